#!/bin/bash
# Builds tandem for any CPU and packs it: a Debian package for this release of Debian, and a tarball to unpack
# anywhere. What scripts/setup.sh installs is there; dpkg-dev finds which libraries the package needs.
# usage: scripts/package/make.sh FOLDER [REVISION]      REVISION is Debian's: 1deb12
set -euo pipefail
out=$(realpath -m "${1:?name a folder for the packages}")
revision=${2:-1}
cd "$(dirname "$0")/../.."

cmake -S . -B build-package -G Ninja -DCMAKE_BUILD_TYPE=Release -DTD_WERROR=OFF -DTD_CUDA_EMULATOR=OFF
ninja -C build-package tandem
cd build-package
cpack -G DEB -B "$out" -D CPACK_DEBIAN_PACKAGE_RELEASE="$revision"
cpack -G TGZ -B "$out" -D CPACK_PACKAGING_INSTALL_PREFIX=/ \
  -D CPACK_PACKAGE_FILE_NAME="tandem-$(bin/tandem --version | cut -d' ' -f2)-$revision-$(uname -m)"
rm -rf "$out/_CPack_Packages"
