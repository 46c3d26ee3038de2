"""Builds images and runs them: `make image-test IMAGES="cpu cuda vllm"`, as root, on Debian or Ubuntu.

Needs `apt-get install buildah mmdebstrap runc`. docs/image.md has what is tested, and what it takes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from draftwood_client import ChatMessage, Client
from tests.helm.chart import render
from tools.image.building import NAMES, REPOSITORY, Builder, Image, run
from tools.image.containers import ADDRESS, Containers

_QUESTION = "where is my order?"
_TOKENS = 200
_USER = (10001, 10001)
_CHOSEN_USER = (1_000_650_000, 0)
"""As OpenShift chooses one."""
_CHART = {"auth": {"open": True}, "replicas": 1, "store": {"mode": "embedded"}, "resources": {"limits": {"cpu": 2}}}
_GPU = {"device": {"type": "nvidia"}}
_VALUES = {"cpu": _CHART, "cuda": _CHART | _GPU, "vllm": _CHART | _GPU | {"engine": "vllm"}}
_INSTEAD_OF_GPUS = {
    "cpu": (),
    "cuda": ("--device=cpu",),
    "vllm": ("--tensor-parallel=1", '--engine-args={"enforce_eager": true}', "--max-context=256"),
}
"""Further arguments of servers."""
_VLLM_ON_CPUS = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
_CHECK_SECONDS = 2.0
"""Of a core, for `draftwood serve --check`."""
_VERSIONS = "import torch, triton; print(f'torch {torch.__version__}, triton {triton.__version__}')"
_LAUNCHER = "from triton.backends.nvidia.driver import CudaUtils; print(CudaUtils().load_binary)"
_KERNELS = """
import json
from tests.model_runner.runners.cuda.test_compiled import KERNELS, compiled
rows = [*compiled(90)]
assert {row["kernel"] for row in rows} >= KERNELS and all(row["cubin_bytes"] > 1000 for row in rows), rows
print(len(rows))
"""
_DRIVER = """
cd /opt/draftwood/lib/python3*/site-packages/triton/backends/nvidia
grep -oE '\\bcu[A-Z][A-Za-z0-9_]*' driver.c | sort -u | sed 's/.*/int &(void) { return 100; }/' |
gcc -shared -x c - -Wl,-soname,libcuda.so.1 -o /usr/lib/libcuda.so.1 && ldconfig
"""
"""In the place of the driver's library, which NVIDIA's container toolkit mounts: functions say that there is no GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What an image did.

    Attributes:
        mib: of its files, unpacked.
        ready_in_s: seconds until its first start served.
        ended_in_s: from SIGTERM, in the midst of an answer, to its end.
        kernels_compiled: for GPUs of compute capability 9.0.
    """

    image: str
    mib: int
    ready_in_s: float
    ended_in_s: float
    kernels_compiled: int = 0


def size(root: Path) -> int:
    """MiB. Prints those of the largest parts."""

    def mib(path: Path) -> int:
        return int(run("du", "-sxm", str(path)).split()[0])

    total = mib(root)
    site = max(root.glob("opt/*/lib/python3*/site-packages"), key=mib)
    largest = sorted(((mib(path), path.name) for path in site.iterdir() if path.is_dir()), reverse=True)[:8]
    print(f"{total} MiB; largest: " + ", ".join(f"{name} {size}" for size, name in largest))
    for name in ("etc/pip.conf", "source", "wheels"):  # where pip's was mounted, an empty file stays
        path = root / name
        assert not path.exists() or path.stat().st_size == 0, f"/{name} is in the image"
    return total


def of_chart(name: str, folder: Path, image: Image) -> tuple[Containers, list[str]]:
    """Containers as those of the chart's server, and their arguments."""
    documents = render(_VALUES[name])
    [pod] = [one["spec"]["template"]["spec"] for one in documents if one["kind"] == "Deployment"]
    [server] = [one for one in pod["containers"] if one["name"] == "server"]
    files = next(one["data"] for one in documents if one["kind"] == "ConfigMap" and "draftwood.yaml" in one["data"])
    config = folder / "config"
    config.mkdir()
    (config / "draftwood.yaml").write_text(files["draftwood.yaml"])
    environment = {variable["name"]: variable["value"] for variable in server["env"]}
    environment |= _VLLM_ON_CPUS if name == "vllm" else {}
    mounts = {"/etc/draftwood/config": config}
    return Containers(folder / "chart", image, _USER, environment, mounts), server["args"]


def serve(containers: Containers, *arguments: str) -> tuple[float, float]:
    """Starts a service, asks it from a container and from here, and drains it in the midst of an answer.

    Returns the seconds until it was ready, and from SIGTERM to its end.
    """
    server = containers.start(*arguments)
    try:
        ready = server.wait_until_ready()
        print(containers.ask("chat", "--max-tokens", "24", _QUESTION).splitlines()[-1])
        with Client(ADDRESS) as client:
            with client.stream([ChatMessage("user", _QUESTION)], max_tokens=_TOKENS, ignore_eos=True) as stream:
                next(iter(stream))
                began = time.monotonic()
                server.terminate()
                for _ in stream:
                    pass
            assert len(stream.completion().token_ids) == _TOKENS, "the drain cut an answer"
        server.output()
        ended = time.monotonic() - began
    finally:
        server.remove()
    print(f"user {containers.user}: ready after {ready:.1f} s, drained with status 0 in {ended:.1f} s", flush=True)
    return ready, ended


def check(containers: Containers, name: str, arguments: Sequence[str]) -> None:
    """`draftwood serve --check`, as the chart's first init container runs it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    output = containers.ask("serve", "--check", *arguments, status=int(name == "cuda"))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < _CHECK_SECONDS, f"serve --check took {seconds:.2f} s of a core"
    print(f"serve --check in {seconds:.2f} s of a core: {output.strip().splitlines()[-1]}")


def refuses_without_a_gpu(containers: Containers, arguments: Sequence[str]) -> None:
    [line] = containers.ask(*arguments, status=1).strip().splitlines()
    assert "this machine has no GPU driver" in line, line
    print(f"without a GPU: {line}")


def compile_kernels(folder: Path, chart: Containers) -> int:
    """Compiles all kernels for GPUs that are not here, and what launches them. Returns how many."""
    program = ("python", "-W", "ignore", "-c")
    packages = folder / "packages"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages))
    run(*pip, "pytest", "pluggy", "iniconfig")
    ours = (REPOSITORY / "tests", REPOSITORY / "benchmarks" / "draftwood_benchmarks")
    mounts = {**chart.mounts, "/packages": packages, **{f"/checks/{path.name}": path for path in ours}}
    containers = Containers(folder / "kernels", chart.image, chart.user, chart.environment, mounts)
    versions = containers.ask(_VERSIONS, program=program).strip()
    assert "+cu" in versions, f"{versions}, which is not for CUDA"
    began = time.monotonic()
    kernels = int(containers.ask(_KERNELS, program=program, PYTHONPATH="/checks:/packages").splitlines()[-1])
    print(f"{kernels} kernels compiled in {time.monotonic() - began:.0f} s, with {versions}")
    run("chroot", str(containers.image.root), "sh", "-c", _DRIVER)
    without = containers.ask(_LAUNCHER, program=program, status=1, PATH="/opt/draftwood/bin")
    assert "Failed to find C compiler" in without, without
    print(f"launcher compiled: {containers.ask(_LAUNCHER, program=program).strip()}", flush=True)
    return kernels


def test(builder: Builder, name: str, folder: Path) -> Row:
    began = time.monotonic()
    builder.build(name)
    print(f"{name}: built in {time.monotonic() - began:.0f} s", flush=True)
    folder.mkdir()
    with builder.mounted(name) as image:
        mib, instead = size(image.root), _INSTEAD_OF_GPUS[name]
        alone = Containers(folder / "alone", image, _USER)
        assert "--auth open" in alone.ask("serve", "--host", "0.0.0.0", status=2)
        chart, arguments = of_chart(name, folder, image)
        check(chart, name, arguments[1:])
        kernels = 0
        if name == "cuda":
            refuses_without_a_gpu(chart, arguments)
        ready, ended = serve(chart, *arguments, *instead)
        if name != "vllm":
            own = (*image.config["Cmd"], "--auth", "open", "--store", "embedded", *instead)
            for each in (alone, alone, Containers(folder / "chosen", image, _CHOSEN_USER)):
                serve(each, *own)
        if name == "cuda":
            kernels = compile_kernels(folder, chart)
    return Row(image=name, mib=mib, ready_in_s=round(ready, 1), ended_in_s=round(ended, 1), kernels_compiled=kernels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", nargs="+", choices=NAMES, help="which to build")
    parser.add_argument("--json", type=Path, help="file to write a row of each image to")
    given = parser.parse_args()
    if os.getuid() or not all(map(shutil.which, ("buildah", "mmdebstrap", "runc"))):
        sys.exit("make image-test needs root, and: apt-get install buildah mmdebstrap runc")
    with tempfile.TemporaryDirectory(prefix="draftwood-image-") as name:
        builder = Builder(Path(name))
        try:
            builder.make_debian()
            rows = [asdict(test(builder, image, Path(name, image))) for image in given.images]
        finally:
            builder.clear()
    if given.json:
        given.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
