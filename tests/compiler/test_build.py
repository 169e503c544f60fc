import errno
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashladder.common import catalog
from flashladder.common.compiler import BuildRequest, LaunchInfo, build, build_one, ninja, translate, translated
from flashladder.common.compiler import compile as build_module
from flashladder.common.compiler.toolchain import toolchain
from flashladder.common.errors import BuildError, ConfigError
from flashladder.common.paths import ROOT
from flashladder.tests.support.attention_params import PARAMS
from flashladder.tests.support.tiny_ladder import HELPER, KERNEL, VERSION_YAML, make_rung

ARCH = "sm_80"
# An array that is indexed at run time has no place in registers.
LOCAL_ARRAY = """
    volatile float array[24];
    for (int i = 0; i < params.seqlen_k; ++i) array[i % 24] = i;
    params.lse[1] = array[params.batch];
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHLADDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def folders(path):
    return sorted(entry.name for entry in path.iterdir())


def test_artifact_holds_what_the_compiler_made(tmp_path):
    version = make_rung(tmp_path / "a space and a 'quote'", "07_tiny")
    progress = []
    request = BuildRequest(version, version.config(block_m=128, num_warps=8), ARCH)
    (artifact,) = build([request], lambda *step: progress.append(step))
    assert artifact.launch == LaunchInfo(256, 1024, 128, 64, **PARAMS)
    assert artifact.registers > 0
    assert artifact.local_bytes == 0
    assert 0 < artifact.compile_seconds < 60
    assert f".entry {artifact.entry}(" in artifact.ptx.read_text()
    assert artifact.cubin.read_bytes()[:4] == b"\x7fELF"
    assert "ptxas info" in artifact.log.read_text()
    assert not artifact.cached
    assert progress == [(1, 1, str(request))]
    again = build_one(version, request.config, ARCH)
    assert again.cached
    assert again.directory == artifact.directory
    assert (again.config, again.launch, again.registers) == (artifact.config, artifact.launch, artifact.registers)


def test_ptx_is_told_of_while_ptxas_goes_on(tmp_path):
    """And what the emulator needs to know is in it; of what the cache has too."""
    version = make_rung(tmp_path)
    request, told = BuildRequest(version, version.config(), ARCH), []

    def wait_for_ptxas(which, module):
        told.append((which, module.ptx.read_text(), module.launch))
        cubin, until = module.directory / "kernel.cubin", time.monotonic() + 60
        while not cubin.exists():
            assert time.monotonic() < until, "ptxas waits for what is told of nvcc"
            time.sleep(0.01)

    (artifact,) = build([request], on_ptx=wait_for_ptxas)
    build([request], on_ptx=wait_for_ptxas)
    assert told == [(request, artifact.ptx.read_text(), artifact.launch)] * 2


def test_what_the_emulator_runs_is_had_without_ptxas(tmp_path, cache, monkeypatch):
    """It is the same PTX: ptxas goes on from it, and an artifact that is there already has it."""
    version = make_rung(tmp_path)
    asked = version, version.config(), ARCH
    assert translated(*asked) is None
    module = translate(*asked)
    assert module == translated(*asked)
    assert {"kernel.ptx", "kernel.cubin"}.intersection(folders(module.directory)) == {"kernel.ptx"}
    assert folders(cache / "artifacts") == []
    told = []
    with monkeypatch.context() as without_nvcc:
        without_nvcc.setattr(build_module, "_nvcc", None)
        (artifact,) = build([BuildRequest(*asked)], on_ptx=lambda _, ptx: told.append(ptx.launch))
    assert (artifact.ptx.read_text(), artifact.launch) == (module.ptx.read_text(), module.launch)
    assert told == [module.launch]
    assert artifact.log.read_text().startswith((module.directory / "build.log").read_text())
    assert "ptxas info" in artifact.log.read_text()
    assert translate(*asked).directory == artifact.directory


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text(path.read_text()[:500])])
def test_damaged_ptx_is_made_again(tmp_path, cache, damage):
    version = make_rung(tmp_path)
    asked = version, version.config(), ARCH
    module = translate(*asked)
    whole = module.ptx.read_text()
    damage(module.ptx)
    assert translated(*asked) is None
    assert translate(*asked).ptx.read_text() == whole
    assert translated(*asked) == module


def test_what_nvcc_refuses_is_told_where_ptx_alone_is_wanted(tmp_path, cache):
    version = make_rung(tmp_path, body="no_such_function();")
    with pytest.raises(BuildError, match=r"07_tiny for sm_80 cannot be built:(.|\n)*no_such_function"):
        translate(version, version.config(), ARCH)
    assert folders(cache / "ptx") == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('asm("no.such.instruction;");', "Not a name of any known instruction"),
        ("no_such_function();", "no_such_function"),
    ],
)
def test_ptx_that_is_wrong_is_not_told_of(tmp_path, body, message):
    version = make_rung(tmp_path, body=body)
    told, progress = [], []
    with pytest.raises(BuildError, match=message):
        build(
            [BuildRequest(version, version.config(), "sm_90")],  # whose PTX nvcc looks at
            lambda *step: progress.append(step[:2]),
            on_ptx=lambda *of: told.append(of),
        )
    assert (told, progress) == ([], [(1, 1)])


def test_one_bad_configuration_does_not_lose_the_others(tmp_path):
    version = make_rung(tmp_path, body='static_assert(config::block_m == 64, "only 64 rows");')
    good, bad = version.config(), version.config(block_m=128)
    requests = [BuildRequest(version, config, ARCH) for config in (bad, good, bad)]
    first, second, third = build(requests, on_error="return")
    assert isinstance(first, BuildError)
    assert str(first) == str(third)
    assert second.config == good
    with pytest.raises(BuildError) as error:
        build(requests)
    message = str(error.value)
    assert "07_tiny with block_m=128 for sm_80 cannot be built" in message
    assert re.search(r"kernel.cu\(7\): error: static assertion failed with \"only 64 rows\"", message)
    assert 'static_assert(config::block_m == 64, "only 64 rows");' in message, "the source line"
    assert "1 more of 3 configurations failed" in message
    assert build_one(version, good, ARCH).cached


def test_edit_of_a_header_rebuilds_just_its_users(tmp_path, cache):
    one, two = make_rung(tmp_path, "01_one"), make_rung(tmp_path, "02_two")
    requests = [BuildRequest(version, version.config(), ARCH) for version in (one, two)]
    before = build(requests)
    (one.directory / "helper.cuh").write_text(HELPER.replace("1.0f", "2.0f"))
    after = build(requests)
    assert [artifact.cached for artifact in after] == [False, True]
    assert after[0].directory != before[0].directory
    (one.directory / "helper.cuh").write_text(HELPER)
    assert all(artifact.cached for artifact in build(requests))
    assert folders(cache / "building") == []


def test_everything_that_matters_is_in_the_key(tmp_path, monkeypatch):
    version = make_rung(tmp_path)

    def place(arch=ARCH, **overrides):
        toolchain.cache_clear()
        request = BuildRequest(version, version.config(**overrides), arch)
        return build_module._place(request, build_module.Sources(), toolchain())

    places = [place(), place(dtype="fp16"), place(arch="sm_86")]
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-DX")
    places.append(place())
    monkeypatch.setattr(build_module, "NVCC_FLAGS", (*build_module.NVCC_FLAGS, "-G"))
    places.append(place())
    (version.directory / "helper.cuh").write_text(HELPER + "\n")
    places.append(place())
    assert len(set(places)) == len(places)
    assert place() == places[-1]
    toolchain.cache_clear()


def test_include_that_the_scan_cannot_follow_is_an_error(tmp_path):
    version = make_rung(tmp_path, body='\n#define HIDDEN "hidden.cuh"\n#include HIDDEN\n')
    (version.directory / "hidden.cuh").write_text("// nothing\n")
    with pytest.raises(BuildError, match=r"includes .*hidden.cuh in a way that the build does not follow"):
        build_one(version, version.config(), ARCH)


@pytest.mark.parametrize("damage", ["empty cubin", "no facts", "garbled facts", "changed ptx"])
def test_damaged_artifact_is_rebuilt(tmp_path, damage):
    version = make_rung(tmp_path)
    artifact = build_one(version, version.config(), ARCH)
    facts = artifact.directory / "artifact.json"
    {
        "empty cubin": lambda: artifact.cubin.write_bytes(b""),
        "no facts": facts.unlink,
        "garbled facts": lambda: facts.write_text(facts.read_text()[:100]),
        "changed ptx": lambda: artifact.ptx.write_text(artifact.ptx.read_text() + "\n"),
    }[damage]()
    rebuilt = build_one(version, version.config(), ARCH)
    assert not rebuilt.cached
    assert rebuilt.directory == artifact.directory
    assert rebuilt.cubin.stat().st_size > 0
    assert build_one(version, version.config(), ARCH).cached


def test_products_that_ptxas_puts_one_after_the_other_fail_the_build(tmp_path):
    """Without the wait, softmax reads scores of products that run: ptxas says so, and waits after each of them."""
    rung = catalog.find("26")
    kernel = rung.kernel.read_text()
    assert "wait_for(s);" in kernel
    yaml = (rung.directory / "version.yaml").read_text()
    broken = make_rung(tmp_path / "ladder", yaml=yaml, kernel=kernel.replace("wait_for(s);", ""))
    with pytest.raises(BuildError, match=r"products that do not run beside other instructions. ptxas: \(C75\d\d\)"):
        build_one(broken, broken.config(), "sm_90a")


def test_local_memory_fails_the_build_unless_the_rung_allows_it(tmp_path):
    version = make_rung(tmp_path, body=LOCAL_ARRAY)
    with pytest.raises(BuildError, match=r"uses local memory: 96 bytes of stack, 0 bytes of spill stores, 0 bytes"):
        build_one(version, version.config(), ARCH)
    tolerant = make_rung(tmp_path, body=LOCAL_ARRAY, yaml=VERSION_YAML + "local_memory: true\n")
    artifact = build_one(tolerant, tolerant.config(), ARCH)
    assert artifact.cached, "the artifact itself is fine"
    assert artifact.main.stack_bytes == artifact.local_bytes == 96


def test_kernel_that_declares_no_launch_is_refused(tmp_path):
    version = make_rung(tmp_path, kernel=re.sub(r"FLASHLADDER_LAUNCH.*\n", "", KERNEL))
    with pytest.raises(BuildError, match="declares no launch; put FLASHLADDER_LAUNCH"):
        build_one(version, version.config(), ARCH)


def test_kernel_with_another_entry_is_refused(tmp_path):
    version = make_rung(tmp_path, kernel=KERNEL.replace("attention_forward", "something_else"))
    with pytest.raises(BuildError, match="ptxas says nothing of a kernel attention_forward"):
        build_one(version, version.config(), ARCH)


def test_source_edited_during_the_build_is_not_cached(tmp_path):
    version = make_rung(tmp_path)
    request = BuildRequest(version, version.config(), ARCH)

    def edit(done, total, latest):
        (version.directory / "helper.cuh").write_text(HELPER.replace("1.0f", "3.0f"))

    with pytest.raises(BuildError, match="edited while it was compiled"):
        build([request], edit)
    assert not build_one(version, version.config(), ARCH).cached


def test_arch_that_the_rung_does_not_run_on(tmp_path):
    version = make_rung(tmp_path)
    with pytest.raises(ConfigError, match="need sm_80 or later, not sm_75"):
        build_one(version, version.config(), "sm_75")


def test_unwritable_cache_names_the_way_out(tmp_path, monkeypatch):
    version = make_rung(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLASHLADDER_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(BuildError, match=r"file/cache cannot be written: Not a directory. Set FLASHLADDER_CACHE"):
        build_one(version, version.config(), ARCH)


def test_a_full_disk_is_said_to_be_full(tmp_path, cache, monkeypatch):
    """Whoever has the words for it: the compiler, this process, or nobody, as the log was on that disk too."""

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    words = f"no space is left in the cache folder {cache}. It may be deleted; FLASHLADDER_CACHE moves it"
    version = make_rung(tmp_path, body="\n#error No space left on device\n")
    with pytest.raises(BuildError, match=words):
        build_one(version, version.config(), ARCH)
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(BuildError, match=words):
        build_one(version, version.config(), ARCH)
    assert folders(cache / "building") == []
    (tmp_path / "log").touch()
    assert ninja.said(tmp_path / "log", "FAILED: [code=1]") == "FAILED: [code=1]"
    monkeypatch.setattr(ninja.shutil, "disk_usage", lambda _: SimpleNamespace(free=300 * 2**10))
    assert re.match(words, ninja.said(tmp_path / "log", "FAILED: [code=1]"))


def test_unchanged_build_takes_no_time(tmp_path):
    version = make_rung(tmp_path)
    requests = [BuildRequest(version, config, ARCH) for config in (version.config(), version.config(dtype="fp16"))]
    build(requests)
    seconds = []
    for _ in range(5):
        start = time.process_time()
        build(requests)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.05


BUILD_IN_A_PROCESS = """
import sys
from pathlib import Path
from flashladder.common.compiler import build_one
from flashladder.common.catalog import find
version = find("tiny", Path(sys.argv[1]))
print("started", flush=True)
print(build_one(version, version.config(), "sm_80").registers)
"""


def start_build(root):
    return subprocess.Popen([sys.executable, "-c", BUILD_IN_A_PROCESS, root], stdout=subprocess.PIPE, text=True)


def test_many_processes_build_the_same_thing(tmp_path, cache):
    version = make_rung(tmp_path)
    processes = [start_build(tmp_path) for _ in range(4)]
    outputs = [process.communicate(timeout=120)[0].split()[-1] for process in processes]
    artifact = build_one(version, version.config(), ARCH)
    assert artifact.cached
    assert outputs == [str(artifact.registers)] * 4
    assert folders(cache / "artifacts") == [artifact.directory.name]
    assert folders(cache / "building") == []


def test_killed_build_leaves_nothing_broken(tmp_path, cache):
    version = make_rung(tmp_path)
    process = start_build(tmp_path)
    leftovers = []
    while not leftovers:
        assert process.poll() is None, "the build ended before it could be killed"
        leftovers = list((cache / "building").glob("*/*/config.cuh"))
    process.kill()
    process.wait()
    assert process.stdout.read() == "started\n"
    artifact = build_one(version, version.config(), ARCH)
    assert not artifact.cached
    deadline = time.monotonic() + 120
    while left := folders(cache / "building"):  # by the next build after the compilers of the killed one have ended
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
        with ninja.temporary_folder():
            pass


def test_a_folder_in_use_is_not_swept_away(cache):
    with ninja.temporary_folder() as first, ninja.temporary_folder() as second:
        assert folders(cache / "building") == sorted([first.name, second.name])
    assert folders(cache / "building") == []


def test_a_folder_without_a_lock_is_swept_away_when_it_is_old(cache):
    (cache / "building" / "of an older version").mkdir(parents=True)
    with ninja.temporary_folder():
        assert len(folders(cache / "building")) == 2
    os.utime(cache / "building" / "of an older version", (0, 0))
    with ninja.temporary_folder() as ours:
        assert folders(cache / "building") == [ours.name]


def test_what_was_compiled_before_a_kill_is_there(tmp_path, monkeypatch):
    """Batches are put into place one after the other."""
    version = make_rung(tmp_path)
    monkeypatch.setattr(build_module, "BATCH", 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    requests = [BuildRequest(version, version.config(block_m=128, num_warps=warps), ARCH) for warps in (4, 8)]
    steps = []

    def killed_in_the_second(done, total, detail):
        steps.append((done, total, detail))
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(requests, killed_in_the_second)
    assert steps == [(1, 2, str(requests[0])), (2, 2, str(requests[1]))]
    assert [artifact.cached for artifact in build(requests)] == [True, False]


def _not_sources(folder, names):
    """What the copy leaves out; `build` and `results` are outputs at the top, and sources in common/."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info")(folder, names)
    return ignored | ({"build", "results"} if Path(folder) == ROOT else set())


@pytest.mark.slow
def test_installed_package_finds_its_kernels(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(ROOT, source, ignore=_not_sources)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", target, source], check=True)
    code = (
        "from flashladder.common import paths, catalog\n"
        "from flashladder.common.problem import config\n"
        "print(paths.ROOT, paths.results_dir(), (paths.CUDA_HEADERS / 'params.cuh').exists())\n"
        "print(catalog.find('02').kernel, config.load_gpu('h100').arch)"
    )
    environment = {**os.environ, "PYTHONPATH": str(target)}
    environment.pop("FLASHLADDER_RESULTS", None)
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    root = target / "flashladder"
    assert run.stdout.split() == [
        *(str(root), str(tmp_path / "results"), "True"),
        *(str(root / "versions" / "forward" / "02_swizzling" / "kernel.cu"), "sm_90a"),
    ]
    command = [sys.executable, target / "bin" / "flashladder"]
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    said = subprocess.run([*command, "run", "--list"], **options)
    assert "02_swizzling" in said.stdout, said.stderr
    refused = subprocess.run([*command, "picture"], **options)
    assert refused.returncode == 2
    assert f"flashladder picture works on the files of a checkout, which {root} is not" in refused.stderr
