#!/bin/sh
# Prints the Pythons on this machine, one for each version that pyproject.toml says is supported and that is not the
# version of $1. Versions are looked for on the PATH, then where pyenv keeps them. On stderr it says which are not here.
set -eu
done=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
for version in $(sed -n 's/.*"Programming Language :: Python :: \(3\.[0-9]*\)".*/\1/p' pyproject.toml); do
    if [ "$version" = "$done" ]; then
        continue
    fi
    found=
    # One that does not start is none: pyenv puts names on the PATH for versions that it has and does not use.
    for python in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/python; do
        if "$python" -c 'import venv' >/dev/null 2>&1; then
            found=$(command -v "$python")
        fi
    done
    if [ -n "$found" ]; then
        echo "$found"
    else
        echo "Python $version is not on this machine: its tests are left out." >&2
    fi
done
