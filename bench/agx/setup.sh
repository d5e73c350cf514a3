#!/usr/bin/env bash
# Build the driver of bench/agx: setup.sh [FOLDER]. It writes FOLDER/agx_lens, by default to the path where bench.agx finds it.
#
# Run it as root on Debian or Ubuntu. It takes 8 minutes on two cores, and 1 GB in FOLDER/build, which can be removed afterwards. The source
# is Debian's package of Mesa, with mesa.patch and the files of driver/.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/torch_metal_attn/agx}
version=25.0.7
pool=https://deb.debian.org/debian
off="egl gbm gles1 gles2 glvnd glx llvm lmsensors libunwind shared-glapi valgrind xmlconfig zstd"

apt-get install -y -qq --no-install-recommends \
  bison dpkg-dev flex g++ gcc libdrm-dev libelf-dev libexpat1-dev patch pkg-config zlib1g-dev >/dev/null
mkdir -p "$folder/build/apt/lists/partial" "$folder/build/apt/cache/archives/partial"
cd "$folder/build"

# A mirror that apt already uses, or Debian's.
mirror=$(apt-get indextargets --format '$(REPO_URI) $(CREATED_BY)' | awk '$2 == "Packages" && $1 ~ /debian\/$/ {print $1; exit}')
echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ${mirror:-$pool} trixie main" >apt/sources.list
from_trixie() {
  apt-get -qq -o Dir::Etc::sourcelist="$PWD/apt/sources.list" -o Dir::Etc::sourceparts=- \
    -o Dir::State::lists="$PWD/apt/lists" -o Dir::Cache="$PWD/apt/cache" "$@"
}
from_trixie update
from_trixie source --download-only mesa
rm -rf mesa-$version
tar xf mesa_$version.orig.tar.xz
patch -s -d mesa-$version -p1 <"$here/mesa.patch"
cp -r "$here/driver" mesa-$version/src/asahi/lens

[ -d venv ] || python3 -m venv venv
venv/bin/pip install -q mako meson ninja packaging pyyaml
export PATH="$PWD/venv/bin:$PATH"
rm -rf objects
meson setup objects mesa-$version --buildtype=release -Db_ndebug=false -Dtools=nir,asahi -Dopengl=false -Dbuild-tests=false \
  -Dgallium-drivers= -Dvulkan-drivers= -Dplatforms= -Dvideo-codecs= $(printf -- '-D%s=disabled ' $off) >setup.log
ninja -C objects src/asahi/lens/agx_lens >>setup.log
cp objects/src/asahi/lens/agx_lens "$folder/agx_lens"
echo "$folder/agx_lens"
