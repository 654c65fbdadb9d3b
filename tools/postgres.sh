#!/bin/sh
# Sees to it that there is a PostgreSQL server for the tests of stores: Debian's, installed where that is possible.
set -eu
if command -v initdb >/dev/null 2>&1 || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1; then
    exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "Installing PostgreSQL for the tests of stores."
    if (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends postgresql) >/dev/null 2>&1; then
        exit 0
    fi
fi
echo "There is no PostgreSQL, and it could not be installed: the tests of it as a store are skipped." >&2
