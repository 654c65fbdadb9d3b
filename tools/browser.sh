#!/bin/sh
# Sees to it that tests/browser has what it needs, where that can be installed: a browser (Debian's Chromium), and
# axe-core, which finds what keeps people from using a page, in the version that tests/browser/package-lock.json pins.
set -eu

tests=$(dirname "$0")/../tests/browser
pinned=$(sed -n 's/.*"axe-core": "\(.*\)".*/\1/p' "$tests/package.json")
if ! grep -qs "\"version\": \"$pinned\"" "$tests/node_modules/axe-core/package.json"; then
    if ! command -v npm >/dev/null 2>&1; then
        echo "There is no npm, so axe-core cannot be installed: the console's tests with it are skipped." >&2
    elif ! said=$(npm ci --prefix "$tests" --no-audit --no-fund --loglevel=error 2>&1); then
        echo "npm could not install axe-core, so the console's tests with it are skipped. It said:" >&2
        echo "$said" | tail -n 5 >&2
    fi
fi

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
