#!/usr/bin/env bash
# Installs the programs of Debian that tests of `make test-system` run, where apt-get may do so.
set -euo pipefail
missing=()
command -v promtool >/dev/null || missing+=(prometheus)
if [ ${#missing[@]} = 0 ]; then
    exit
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    apt="apt-get -qq -o APT::Sandbox::User=root" # a user of apt's own may not write to /tmp everywhere
    $apt update && $apt install --yes --no-install-recommends "${missing[@]}" >/dev/null && exit
fi
echo "SKIPPED: tests with ${missing[*]}, which could not be installed; on Debian: apt-get install ${missing[*]}" >&2
