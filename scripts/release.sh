#!/usr/bin/env bash
# Builds the wheel and the source archive of a tag into dist/, and tries the wheel: ./scripts/release.sh v0.1.0
# What is built is the tag, not the working tree. Nothing is uploaded; the last line says how.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tag=${1:?give the tag, such as v0.1.0}
python=${PYTHON:-python3}
fail() { echo "release.sh: $1" >&2 && exit 1; }

git rev-parse --quiet --verify "refs/tags/$tag" >/dev/null || fail "there is no tag $tag; make it with git tag -a $tag"
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
git archive "$tag" | tar -x -C "$tree"
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$tree/pyproject.toml")
[[ $tag == "v$version" ]] || fail "pyproject.toml of $tag has version $version; tag v$version or change the version"
grep -q "^## $version (20" "$tree/CHANGELOG.md" || fail "CHANGELOG.md of $tag has no heading '## $version (date)'; add it"
grep -q "^version: $version$" "$tree/CITATION.cff" || fail "CITATION.cff of $tag has another version; write $version"

"$python" -m pip wheel --quiet --no-deps --wheel-dir dist "$tree"
git archive --format tar.gz --prefix "torchtitan_magi-$version/" --output "dist/torchtitan_magi-$version.tar.gz" "$tag"
wheel="dist/torchtitan_magi-$version-py3-none-any.whl"
"$python" -m pip install --quiet --no-deps --no-compile --target "$tree/site" "$wheel"
(cd "$tree/site" && "$python" -c "import torchtitan_magi.kernels as k; assert '$tree/site' in k.__file__, k.__file__")
for kernel in "$tree"/kernels/*.cu*; do
    [[ -f $tree/site/torchtitan_magi/kernels/$(basename "$kernel") ]] || fail "the wheel lacks $(basename "$kernel"); see package-data"
done
echo "dist/ has $(basename "$wheel") and the source archive; upload them with: twine upload dist/torchtitan_magi-$version*"
