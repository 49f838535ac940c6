"""A real Triton Inference Server without a GPU: the binary of the nvidia-pytriton wheel, in an environment of its own
(`make test` makes it), because its Python backend wants NumPy 1."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import uuid
from pathlib import Path
from typing import Any

import httpx

from specrun.runner.triton.repository import MODEL

ENVIRONMENT = Path(sys.prefix) / "triton"


def packages() -> Path:
    """Where the environment has its packages."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return ENVIRONMENT / "lib" / version / "site-packages"


def _backends(folder: Path) -> Path:
    """Of symbolic links: the wheel keeps the stubs apart, and copies would lose where their libraries are. Returns the
    server's binary."""
    root = packages() / "pytriton" / "tritonserver"
    python = folder / "python"
    python.mkdir(parents=True)
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        (python / name).symlink_to(root / "backends/python" / name)
    stub = root / "python_backend_stubs" / f"{sys.version_info.major}.{sys.version_info.minor}"
    (python / "triton_python_backend_stub").symlink_to(stub / "triton_python_backend_stub")
    return root / "bin/tritonserver"


class Triton:
    """A server and where it listens."""

    def __init__(self, repository: Path, work: Path) -> None:
        self.log = work / "triton.log"
        self._shared_memory = f"sr{uuid.uuid4().hex[:10]}_"
        with contextlib.ExitStack() as free:
            sockets = [free.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
            ports = [each.getsockname()[1] for each in sockets]
        self.http, self.grpc, self.metrics = (f"127.0.0.1:{port}" for port in ports)
        binary = _backends(work / "backends")
        libraries = [sysconfig.get_config_var("LIBDIR"), str(packages() / "nvidia_pytriton.libs")]
        environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
        environment |= {
            "PATH": f"{ENVIRONMENT}/bin:{os.environ['PATH']}",  # the first python3 picks the environment
            "LD_LIBRARY_PATH": ":".join(libraries),
        }
        # Dies with the tests; not by preexec_fn, which forks with gRPC loaded.
        guard = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        self.process = subprocess.Popen(
            [
                *guard,
                str(binary),
                f"--model-repository={repository}",
                f"--backend-directory={work / 'backends'}",
                f"--backend-config=python,shm-region-prefix-name={self._shared_memory}",
                *(f"--{name}-address=127.0.0.1" for name in ("http", "grpc", "metrics")),
                *(f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), ports, strict=True)),
                "--allow-gpu-metrics=false",
                "--pinned-memory-pool-byte-size=0",
                "--disable-auto-complete-config",
                "--exit-timeout-secs=20",
                "--model-config-name=cpu",
            ],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self.log.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait_ready(self, seconds: float = 90) -> "Triton":
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://{self.http}/v2/health/ready", timeout=1, trust_env=False).status_code == 200:
                    return self
        code = self.stop()
        raise RuntimeError(f"tritonserver is not ready, exit code {code}:\n{self.errors()}")

    def errors(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if line[:1] not in "I|+")[-4000:]

    def generate(self, body: dict[str, Any], stream: bool = False) -> tuple[int, list[dict[str, Any]]]:
        """Status, and the responses."""
        path = "generate_stream" if stream else "generate"
        with httpx.Client(timeout=120, trust_env=False) as client:  # closed: an idle connection delays the shutdown
            reply = client.post(f"http://{self.http}/v2/models/{MODEL}/{path}", json=body)
        lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.strip()]
        return reply.status_code, [json.loads(line) for line in lines]

    def kill_stub(self) -> None:
        """The process that runs the model."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        stubs = [int(pid) for pid in children if "python_backend" in Path(f"/proc/{pid}/cmdline").read_text()]
        assert stubs, "no stub"
        for pid in stubs:
            os.kill(pid, signal.SIGKILL)

    def metric(self, name: str) -> float:
        text = httpx.get(f"http://{self.metrics}/metrics", trust_env=False).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"specrun:{name}{{"))

    def stop(self, seconds: float = 40) -> int:
        """The exit code. Clients must be closed before."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # stubs that a crashed server left
        code = self.process.wait()
        for file in Path("/dev/shm").glob(f"{self._shared_memory}*"):
            file.unlink(missing_ok=True)
        return code
