#!/bin/sh
# Makes an image ready for SkyPilot 0.14.1, as root, on Debian 12 with the packages of the Dockerfile beside it. What it
# installs, SkyPilot need not download at each launch: uv, Ray, and the packages that SkyPilot's own wheel needs. The
# wheel itself comes from the user's machine.
set -eu

python3 -m venv "$HOME/skypilot-runtime"
"$HOME/skypilot-runtime/bin/pip" install --no-cache-dir --disable-pip-version-check --root-user-action=ignore \
    uv==0.8.22 "setuptools<70" "click<8.2.0" "ray[default]==2.9.3" "pydantic-core==2.41.1" \
    "skypilot[primeintellect,remote]==0.14.1"
"$HOME/skypilot-runtime/bin/pip" uninstall --yes --quiet --root-user-action=ignore skypilot
mkdir -p "$HOME/.local/bin"
ln -sf "$HOME/skypilot-runtime/bin/uv" "$HOME/.local/bin/uv"

# SkyPilot restarts services of a machine, which a container does not have.
for name in systemctl service; do
    command -v "$name" >/dev/null && continue
    printf '#!/bin/sh\nexit 0\n' >"/usr/local/bin/$name"
    chmod 755 "/usr/local/bin/$name"
done
