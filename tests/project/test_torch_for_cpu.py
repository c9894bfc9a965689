"""The Makefile's choice of torch: the CPU build, where pip would bring CUDA to a machine without a GPU."""

import json
import runpy
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "torch_for_cpu.py"


@pytest.fixture
def script(monkeypatch):
    """The script's names, as functions of a machine with Linux and no GPU, where pip would install `packages`."""

    def loaded(packages, *, has_gpu=False, platform="linux"):
        report = json.dumps({"install": [{"metadata": {"name": name}} for name in packages]})
        done = subprocess.CompletedProcess([], 0, stdout=report, stderr="")
        names = runpy.run_path(str(SCRIPT))
        scope = names["main"].__globals__
        monkeypatch.setattr(scope["subprocess"], "run", lambda *_, **__: done)
        monkeypatch.setattr(scope["sys"], "platform", platform)
        scope["has_nvidia_gpu"] = lambda: has_gpu
        return names["main"]

    return loaded


CUDA = ["torch", "nvidia-cublas-cu12", "triton"]


def test_without_a_gpu_the_cpu_build_is_taken_and_said(script, capsys):
    script(CUDA)(["--no-compile"])
    shown = capsys.readouterr()
    assert shown.out == "--extra-index-url https://download.pytorch.org/whl/cpu\n"
    assert "no NVIDIA GPU is here" in shown.err


@pytest.mark.parametrize(
    ("packages", "machine", "arguments"),
    [
        (["torch", "sympy"], {}, []),  # pip brings no CUDA anyway
        (CUDA, {"has_gpu": True}, []),
        (CUDA, {"platform": "darwin"}, []),
        (CUDA, {}, ["--index-url", "https://example.org/simple"]),
        ([], {}, []),
    ],
)
def test_else_pip_decides(script, capsys, packages, machine, arguments):
    script(packages, **machine)(arguments)
    assert capsys.readouterr().out == ""


def test_what_pip_can_not_say_is_left_to_pip(monkeypatch, capsys):
    names = runpy.run_path(str(SCRIPT))
    done = subprocess.CompletedProcess([], 1, stdout="ERROR: no network", stderr="")
    monkeypatch.setattr(names["main"].__globals__["subprocess"], "run", lambda *_, **__: done)
    assert not names["brings_cuda"]([])
