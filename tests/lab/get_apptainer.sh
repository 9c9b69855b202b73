#!/bin/bash
# get_apptainer.sh FOLDER MIRROR: Apptainer as Debian unstable builds it, with the C library it wants, in FOLDER.
# FOLDER may be renamed afterwards only where FINAL names the place it will be in (default: without ".part").
set -euo pipefail
folder=$(realpath -m "$1") mirror=$2 final=${FINAL:-${1%.part}}
lists=$folder/apt
mkdir -p "$lists"/{state/partial,cache/archives/partial,debs} "$folder"/libc
chmod -R a+rX "$folder"

# apt checks the signatures; its own lists stay untouched
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror sid main" > "$lists/sources"
apt=(apt-get -qq -o "Dir::Etc::SourceList=$lists/sources" -o Dir::Etc::SourceParts=/dev/null
     -o "Dir::State::Lists=$lists/state" -o "Dir::Cache=$lists/cache" -o APT::Sandbox::User=root)
"${apt[@]}" update
(cd "$lists/debs" && "${apt[@]}" download apptainer libc6)
dpkg-deb -x "$lists"/debs/apptainer_*.deb "$folder"
dpkg-deb --fsys-tarfile "$lists"/debs/libc6_*.deb | tar -x -C "$folder/libc"
rm -rf "$lists"

arch=$(dpkg-architecture -qDEB_HOST_MULTIARCH 2>/dev/null || echo "$(uname -m)-linux-gnu")
libc=$final/libc/usr/lib/$arch
loader=$(basename "$(ls "$folder/libc/usr/lib/$arch"/ld-linux-*.so.*)")
for program in "$folder/usr/bin/apptainer" "$folder/usr/lib/$arch/apptainer/bin/starter"; do
  patchelf --set-interpreter "$libc/$loader" --force-rpath --set-rpath "$libc:/usr/lib/$arch" "$program"
done

# moved away from /usr, the command looks for its settings in usr/etc and usr/var, the starter in usr/lib
mkdir -p "$folder/usr/etc" "$folder/usr/var"
cp -a "$folder/etc/apptainer" "$folder/usr/etc/"
cp -a "$folder/var/lib" "$folder/usr/var/"
ln -s ../etc "$folder/usr/lib/etc"
ln -s ../var "$folder/usr/lib/var"
# root of a machine that withholds capabilities could not start anything with all of them
sed -i 's/^root default capabilities = full/root default capabilities = no/' "$folder/usr/etc/apptainer/apptainer.conf"
