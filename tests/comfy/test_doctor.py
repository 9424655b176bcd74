"""The doctor in ComfyUI's Python: compares both ComfyUIs, and splits a tiny Wan with a real worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from monarch_split.demo.worker_process import PACK


def test_two_comfyuis_are_compared_and_a_tiny_model_is_split(
    idle_driver: Any, shared_worker: Any, comfyui_path: Path, tmp_path: Path
) -> None:
    idle_driver.use(shared_worker.address)
    (tmp_path / "models" / "diffusion_models").mkdir(parents=True)
    (tmp_path / "models" / "diffusion_models" / "large.safetensors").write_bytes(bytes(1000))
    command = [sys.executable, str(PACK), "doctor", "--json", "--comfyui", str(comfyui_path)]
    done = subprocess.run(
        [*command, "--", "--cpu", "--base-directory", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "MONARCH_CONFIG_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    # Nothing but the object, whatever ComfyUI and its packages print.
    said = json.loads(done.stdout)
    checks = {check["name"]: check for check in said["checks"]}
    assert done.returncode == 0, said
    assert not [check for check in said["checks"] if check["status"] != "pass"]
    assert "large.safetensors" in checks["models"]["detail"]
    address = shared_worker.address
    assert "ComfyUI" in checks["software"]["detail"]
    assert "ComfyUI" in checks[f"software {address}"]["detail"]
    assert "split by rows" in checks[f"rows {address}"]["detail"]
    assert "split by tokens" in checks[f"tokens {address}"]["detail"]
