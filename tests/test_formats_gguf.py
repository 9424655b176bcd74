"""GGUF: files of any version and name, and MODELs that were loaded from one, are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_split.formats import (
    UnsupportedFile,
    gguf_refusal,
    inspect_file,
    is_gguf_file,
    is_gguf_model,
    require_loadable,
)
from monarch_split.tests.model_files import GGUF_V2, GGUF_V3, lay_out

Save = Callable[..., Path]


@pytest.mark.parametrize("content", [GGUF_V2, GGUF_V3], ids=["v2", "v3"])
@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors", "model.sft", "model.ckpt", "model"])
def test_gguf_is_refused_whatever_it_is_called(save: Save, name: str, content: bytes) -> None:
    path = save(content, name)
    assert is_gguf_file(path)
    report = inspect_file(path)
    assert (report.format, report.loadable, report.bytes) == ("gguf", False, len(content))
    with pytest.raises(UnsupportedFile) as caught:
        require_loadable(path)
    message = str(caught.value)
    assert message.startswith(name)
    assert all(word in message for word in ("GGUF", "cannot be split", "BF16", "FP8", "NVFP4", "INT8"))


def test_other_files_are_not_taken_for_gguf(save: Save, tmp_path: Path) -> None:
    assert not is_gguf_file(save(lay_out({"weight": ("BF16", [2, 2])}), "named.gguf"))
    assert not is_gguf_file(save(b"GGU", "short.gguf"))
    assert not is_gguf_file(tmp_path / "missing.gguf")
    assert not is_gguf_file(tmp_path)


class GGMLLayer: ...


class GGMLTensor: ...


class GGMLOps:
    class Linear(GGMLLayer): ...


class Plain: ...


class Model:
    """As much of a comfy BaseModel as detection looks at; counts how often the weights were walked."""

    def __init__(self, operations: object = None, module: object = None, parameter: object = None) -> None:
        self.model_config = SimpleNamespace(custom_operations=operations)
        self.walks = 0
        self._module, self._parameter = module or Plain(), parameter or Plain()

    def modules(self) -> Any:
        self.walks += 1
        return iter([Plain(), self._module])

    def parameters(self) -> Any:
        self.walks += 1
        return iter([Plain(), self._parameter])


class ModelPatcher:
    def __init__(self, model: Any) -> None:
        self.model = model


class GGUFModelPatcher(ModelPatcher): ...


class ForkedPatcher(GGUFModelPatcher): ...


@pytest.mark.parametrize("patcher_class", [GGUFModelPatcher, ForkedPatcher])
def test_model_of_a_gguf_loader_is_recognised_by_its_class_without_walking_weights(patcher_class: Any) -> None:
    patcher = patcher_class(Model())
    assert is_gguf_model(patcher)
    assert patcher.model.walks == 0


@pytest.mark.parametrize("operations", [GGMLOps, GGMLOps()])
def test_gguf_operations_are_recognised_in_a_model_wrapped_anew(operations: object) -> None:
    patcher = ModelPatcher(Model(operations))
    assert is_gguf_model(patcher)
    assert patcher.model.walks == 0


@pytest.mark.parametrize("holds", [{"module": GGMLOps.Linear()}, {"parameter": GGMLTensor()}])
def test_gguf_weights_are_recognised_where_nothing_else_tells(holds: dict[str, Any]) -> None:
    assert is_gguf_model(ModelPatcher(Model(**holds)))


def test_stock_models_and_odd_objects_are_not_taken_for_gguf() -> None:
    for thing in (ModelPatcher(Model()), ModelPatcher(None), None, SimpleNamespace(model=SimpleNamespace(modules=3))):
        assert not is_gguf_model(thing)


def test_function_that_loads_gguf_does_not_mark_the_classes_inside_it() -> None:
    class Local: ...

    assert "gguf" in Local.__qualname__
    assert not is_gguf_model(ModelPatcher(Local()))


def test_real_parameters_keep_the_class_that_detection_looks_for() -> None:
    torch = pytest.importorskip("torch")

    class GGMLTensor(torch.Tensor): ...

    layer = torch.nn.Linear(2, 2)
    assert not is_gguf_model(ModelPatcher(layer))
    layer.weight = torch.nn.Parameter(torch.zeros(2, 2).as_subclass(GGMLTensor), requires_grad=False)
    assert is_gguf_model(ModelPatcher(layer))


def test_refusal_of_a_gguf_model_names_its_classes_where_no_file_is_known() -> None:
    message = gguf_refusal(patcher=GGUFModelPatcher(Model()))
    assert "Model model (GGUFModelPatcher)" in message
    assert "cannot be split" in message
