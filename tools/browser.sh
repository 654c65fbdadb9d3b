#!/bin/sh
# Sees to it that there is a browser for tests/browser: Debian's Chromium, installed where that is possible.
set -eu
for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null 2>&1; then
        exit 0
    fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "Installing Chromium for the tests of the console."
    if (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium) >/dev/null 2>&1; then
        exit 0
    fi
fi
echo "There is no Chromium, and it could not be installed: the tests of the console in a browser are skipped." >&2
