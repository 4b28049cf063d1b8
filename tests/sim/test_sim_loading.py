"""Where the simulated accelerator appears, where it must not, and what it says when it cannot."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.sim


def printed(done):
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


LOOK = "import torch; print(hasattr(torch, 'sim'), torch._C._get_privateuse1_backend_name())"


def test_torch_alone_does_not_load_it(run_python):
    assert printed(run_python(LOOK)) == ["False", "privateuseone"]


def test_torch_loads_it_where_the_environment_asks(run_python):
    assert printed(run_python(LOOK, LMCACHE_SIM_AUTOLOAD="1")) == ["True", "sim"]
    off = {"LMCACHE_SIM_AUTOLOAD": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert printed(run_python(LOOK, **off)) == ["False", "privateuseone"]
    wrong = run_python(LOOK, LMCACHE_SIM_AUTOLOAD="yes")
    assert "LMCACHE_SIM_AUTOLOAD=yes: expected 0 or 1" in wrong.stderr


REFUSED = """
import sys, types, torch
{before}
try:
    import lmcache_sim
except ImportError as exc:
    print(exc)
print(hasattr(torch, "sim"), torch._C._get_privateuse1_backend_name())
print(torch.ones(3).sum().item())
"""


def test_it_refuses_a_torch_of_another_minor_version_and_leaves_it_as_it_was(run_python):
    fake = "sys.modules['lmcache_sim._built'] = types.SimpleNamespace(TORCH_BUILT='2.9.1')"
    done = run_python(REFUSED.format(before=fake))
    assert done.returncode == 0, done.stderr
    message, state, works = done.stdout.splitlines()
    assert message.startswith(
        f"lmcache-sim was built for torch 2.9 and torch {torch.__version__} is installed: rebuild"
    )
    assert state == "False privateuseone"
    assert works == "3.0"


def test_it_takes_a_torch_of_the_same_minor_version(run_python):
    major, minor = torch.__version__.split(".")[:2]
    fake = f"sys.modules['lmcache_sim._built'] = types.SimpleNamespace(TORCH_BUILT='{major}.{minor}.99')"
    assert printed(run_python(REFUSED.format(before=fake)))[:2] == ["True", "sim"]


def test_it_refuses_a_process_that_another_backend_has_named(run_python):
    done = run_python(REFUSED.format(before="torch.utils.rename_privateuse1_backend('other')"))
    message, state, _ = done.stdout.splitlines()
    assert "cannot be loaded beside the torch device 'other'" in message
    assert state == "False other"


def test_it_refuses_a_process_whose_backend_has_no_name_yet(run_python):
    hooks = "type('Hooks', (torch._C._acc.PrivateUse1Hooks,), {})()"
    done = run_python(REFUSED.format(before=f"torch._C._acc.register_python_privateuseone_hook({hooks})"))
    assert done.returncode == 0, done.stderr
    assert "another backend has claimed" in done.stdout


def test_its_metadata_ask_for_the_torch_it_was_built_for():
    import lmcache_sim._built

    major, minor = map(int, lmcache_sim._built.TORCH_BUILT.split(".")[:2])
    (needed,) = importlib.metadata.requires("lmcache-sim")
    assert needed.replace(" ", "") in (
        f"torch>={major}.{minor},<{major}.{minor + 1}",
        f"torch<{major}.{minor + 1},>={major}.{minor}",
    )


def test_one_wheel_serves_every_python_and_the_driver_needs_no_torch():
    import lmcache_sim

    wheel = importlib.metadata.distribution("lmcache-sim").read_text("WHEEL")
    assert "Tag: py3-none-linux_x86_64" in wheel
    driver = Path(lmcache_sim.library_path())
    for library in driver.parent.glob("*.so"):
        symbols = subprocess.run(
            ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
        )
        assert " Py" not in symbols.stdout, library
    needed = subprocess.run(["readelf", "-d", driver], capture_output=True, text=True, check=True).stdout
    assert "NEEDED" in needed
    assert "torch" not in needed
    assert "c10" not in needed
    assert Path(lmcache_sim.get_include(), "lmcache_sim.h").is_file()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LMCACHE_SIM_MEMORY", "much"),
        ("LMCACHE_SIM_MEMORY", "4GB"),
        ("LMCACHE_SIM_DEVICES", "-1"),
        ("LMCACHE_SIM_DELAY_US", "1KiB"),
        ("LMCACHE_SIM_VISIBLE_DEVICES", "0,0"),
        ("LMCACHE_SIM_VISIBLE_DEVICES", "2"),
        ("LMCACHE_SIM_PROTECT", "maybe"),
    ],
)
def test_a_wrong_setting_is_named_and_breaks_nothing_but_the_device(run_python, name, value):
    code = "print(driver.LIB.lmcache_sim_device_count(), driver.LIB.lmcache_sim_last_error().decode())"
    done = run_python(code, torch=False, **{name: value})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"-1 {name}={value}: expected")


def test_a_wrong_setting_leaves_torch_usable(run_python):
    code = (
        "import torch, lmcache_sim\nprint(torch.sim.is_available(), torch.ones(2).sum().item())\n"
        "try:\n torch.sim.device_count()\nexcept RuntimeError as exc:\n print(exc)\n"
    )
    done = run_python(code, LMCACHE_SIM_MEMORY="much")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "False 2.0"
    assert second.startswith("LMCACHE_SIM_MEMORY=much: expected")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_number_of_devices_is_a_setting(run_python, count):
    code = "print(driver.LIB.lmcache_sim_device_count())"
    assert printed(run_python(code, torch=False, LMCACHE_SIM_DEVICES=str(count))) == [str(count)]


def test_asking_whether_there_is_a_device_uses_none(run_python):
    code = (
        "import torch, lmcache_sim; a = torch.sim.is_available(); b = torch.sim.is_initialized()\n"
        "torch.zeros(1, device='sim'); print(a, b, torch.sim.is_initialized())"
    )
    assert printed(run_python(code)) == ["True", "False", "True"]


FORK = """
import os, torch, lmcache_sim
{before}
pid = os.fork()
if pid == 0:
    try:
        print(torch.ones(3, device="sim").sum().item(), flush=True)
    except RuntimeError as exc:
        print(exc, flush=True)
    {after}
    os._exit(0)
print(os.waitpid(pid, 0)[1])
{check}
"""


def test_a_child_forked_after_use_is_told_so_and_does_its_parent_no_harm(run_python):
    code = FORK.format(
        before="data = torch.arange(4.0).to('sim')", after="del data", check="print(data.cpu().tolist())"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    said, status, parent = done.stdout.splitlines()
    assert "start it with spawn instead of fork" in said
    assert status == "0"
    assert parent == "[0.0, 1.0, 2.0, 3.0]"


def test_a_child_forked_before_use_has_the_device(run_python):
    assert printed(run_python(FORK.format(before="", after="", check=""))) == ["3.0", "0"]


def test_the_process_ends_while_work_is_queued(run_python):
    code = (
        "import torch, lmcache_sim\nstream = torch.sim.current_stream()\n"
        "data = torch.zeros(4, device='sim')\ntorch.sim.set_delay(100000)\n"
        "for _ in range(600): data.fill_(1)\nstream.launch_host_func(lambda: print('late'))\nprint('end')"
    )
    done = run_python(code)
    assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr
