#!/bin/sh
# Installs what compiles for a GPU on a machine without one: JAX's CUDA plugin, its PJRT library
# and ptxas, of the version of the jaxlib in the virtual environment, without what they need to
# run (about 0.5 GB instead of 5). They go to <venv>/aot, off the normal import path.
#   sh scripts/install_aot.sh [VENV]      (default .venv)
set -eu
venv="${1:-.venv}"
python="$venv/bin/python"
version="$("$python" -c 'import jaxlib.version as v; print(v.__version__)')"
if [ -d "$venv/aot/jax_cuda12_plugin-$version.dist-info" ]; then
	echo "JAX's CUDA plugin $version is in $venv/aot already"
	exit 0
fi
rm -rf "$venv/aot"
"$python" -m pip --disable-pip-version-check install -q --no-deps --target "$venv/aot" \
	"jax-cuda12-plugin==$version" "jax-cuda12-pjrt==$version" "nvidia-cuda-nvcc-cu12>=12.9.86"
echo "installed JAX's CUDA plugin $version and ptxas in $venv/aot"
