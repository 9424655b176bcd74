"""A workflow as ComfyUI's page saves it is turned into what the page would send, or refused; then made measurable.

`object_info.json` is what a ComfyUI 0.33 says of these nodes, with its lists of files and options shortened."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from monarch_split import cli
from monarch_split.bench.errors import BenchError
from monarch_split.bench.graph import measurable
from monarch_split.bench.server import with_absolute_paths
from monarch_split.bench.ui_graph import CannotConvert, to_api
from monarch_split.bench.workflow import read_workflow

HERE = Path(__file__).parent
INFO = json.loads((HERE / "object_info.json").read_text())
TEMPLATES = HERE.parent / "example_workflows"


def node(key: int, kind: str, values: Any = None, inputs: Any = (), outputs: Any = (), **more: Any) -> dict[str, Any]:
    """A node as it is saved. inputs: (name, type, link); outputs: types."""
    return {
        "id": key, "type": kind, "mode": 0, "widgets_values": values,
        "inputs": [{"name": name, "type": type_, "link": link} for name, type_, link in inputs],
        "outputs": [{"name": type_, "type": type_} for type_ in outputs],
        **more,
    }  # fmt: skip


SAMPLER = ("model", "MODEL", 1), ("positive", "CONDITIONING", 2), ("negative", "CONDITIONING", 3), (
    "latent_image", "LATENT", 4,
)  # fmt: skip
WORKFLOW: dict[str, Any] = {
    "nodes": [
        node(1, "UNETLoader", ["flux.safetensors", "default"], outputs=["MODEL"]),
        node(2, "CLIPTextEncode", ["a {red|green} bird // quick"], [("clip", "CLIP", 9)], ["CONDITIONING"]),
        node(3, "EmptyLatentImage", [512, 768, 2], outputs=["LATENT"]),
        node(4, "KSampler", [7, "randomize", 20, 3.5, "euler", "simple", 0.9], SAMPLER, ["LATENT"], title="Draw"),
        node(5, "VAEDecode", None, [("samples", "LATENT", 5), ("vae", "VAE", 8)], ["IMAGE"]),
        node(6, "SaveImage", ["out"], [("images", "IMAGE", 6)]),
        node(7, "CheckpointLoaderSimple", ["all.safetensors"], outputs=["MODEL", "CLIP", "VAE"]),
        node(8, "MarkdownNote", ["read me"]),
    ],
    "links": [
        [1, 1, 0, 4, 0, "MODEL"], [2, 2, 0, 4, 1, "CONDITIONING"], [3, 2, 0, 4, 2, "CONDITIONING"],
        [4, 3, 0, 4, 3, "LATENT"], [5, 4, 0, 5, 0, "LATENT"], [6, 5, 0, 6, 0, "IMAGE"],
        [8, 7, 2, 5, 1, "VAE"], [9, 7, 1, 2, 0, "CLIP"],
    ],
}  # fmt: skip


@pytest.fixture
def workflow() -> dict[str, Any]:
    return copy.deepcopy(WORKFLOW)


def between(workflow: dict[str, Any], link: int, put: dict[str, Any], new_link: int) -> None:
    """Put a node with one output into a link: it takes the link, and gives `new_link` to where that went."""
    found = next(entry for entry in workflow["links"] if entry[0] == link)
    target = next(each for each in workflow["nodes"] if each["id"] == found[3])
    workflow["links"].append([new_link, put["id"], 0, found[3], found[4], found[5]])
    next(slot for slot in target["inputs"] if slot["link"] == link)["link"] = new_link
    workflow["nodes"].append(put)


def api(workflow: dict[str, Any]) -> dict[str, Any]:
    return to_api(workflow, INFO)[0]


class TestConverting:
    def test_values_stay_with_their_widgets_behind_a_seed(self, workflow: dict[str, Any]) -> None:
        graph = api(workflow)
        assert graph["4"] == {
            "class_type": "KSampler",
            "inputs": {
                "seed": 7, "steps": 20, "cfg": 3.5, "sampler_name": "euler", "scheduler": "simple", "denoise": 0.9,
                "model": ["1", 0], "positive": ["2", 0], "negative": ["2", 0], "latent_image": ["3", 0],
            },
            "_meta": {"title": "Draw"},
        }  # fmt: skip
        assert graph["3"]["inputs"] == {"width": 512, "height": 768, "batch_size": 2}
        assert graph["5"]["inputs"] == {"samples": ["4", 0], "vae": ["7", 2]}
        assert "8" not in graph

    def test_a_seed_without_its_control_moves_nothing(self, workflow: dict[str, Any]) -> None:
        workflow["nodes"][3]["widgets_values"].remove("randomize")
        assert api(workflow) == api(WORKFLOW)

    def test_values_that_were_saved_by_name_are_taken_by_name(self, workflow: dict[str, Any]) -> None:
        workflow["nodes"][3]["widgets_values_named"] = {"steps": 9, "seed": 8, "control_after_generate": "fixed"}
        inputs = api(workflow)["4"]["inputs"]
        assert (inputs["seed"], inputs["steps"]) == (8, 9)
        assert inputs["cfg"] == INFO["KSampler"]["input"]["required"]["cfg"][1]["default"]

    def test_links_of_newer_pages(self, workflow: dict[str, Any]) -> None:
        names = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
        workflow["links"] = [dict(zip(names, link, strict=True)) for link in workflow["links"]]
        assert api(workflow) == api(WORKFLOW)

    def test_reroutes_are_followed(self, workflow: dict[str, Any]) -> None:
        between(workflow, 1, node(20, "Reroute", None, [("", "*", 1)], ["MODEL"]), 21)
        between(workflow, 21, node(22, "Reroute", None, [("", "*", 21)], ["MODEL"]), 23)
        graph = api(workflow)
        assert graph["4"]["inputs"]["model"] == ["1", 0]
        assert not {"20", "22"} & set(graph)

    def test_a_ring_of_reroutes_ends(self, workflow: dict[str, Any]) -> None:
        between(workflow, 1, node(20, "Reroute", None, [("", "*", 21)], ["MODEL"]), 21)
        assert "model" not in api(workflow)["4"]["inputs"]

    def test_a_bypassed_node_hands_on_what_has_the_type_of_its_output(self, workflow: dict[str, Any]) -> None:
        lora = node(20, "LoraLoaderModelOnly", ["a.safetensors", 1.0], [("clip", "CLIP", 9), ("model", "MODEL", 1)],
                    ["MODEL"], mode=4)  # fmt: skip
        between(workflow, 1, lora, 21)
        graph = api(workflow)
        assert graph["4"]["inputs"]["model"] == ["1", 0]
        assert "20" not in graph

    def test_what_comes_from_a_muted_node_is_not_linked(self, workflow: dict[str, Any]) -> None:
        between(workflow, 1, node(20, "LoraLoaderModelOnly", ["a.safetensors", 1.0], [("model", "MODEL", 1)],
                                  ["MODEL"], mode=2), 21)  # fmt: skip
        graph = api(workflow)
        assert "model" not in graph["4"]["inputs"]
        assert "20" not in graph

    def test_a_primitive_gives_its_value(self, workflow: dict[str, Any]) -> None:
        workflow["nodes"][3]["inputs"].append({"name": "steps", "type": "INT", "link": 30, "widget": {"name": "steps"}})
        workflow["nodes"].append(node(30, "PrimitiveNode", [33, "fixed"], outputs=["INT"]))
        workflow["links"].append([30, 30, 0, 4, 4, "INT"])
        graph = api(workflow)
        assert graph["4"]["inputs"]["steps"] == 33
        assert graph["4"]["inputs"]["cfg"] == 3.5
        assert "30" not in graph

    def test_a_widget_that_is_linked_takes_the_link(self, workflow: dict[str, Any]) -> None:
        workflow["nodes"][3]["inputs"].append({"name": "steps", "type": "INT", "link": 30, "widget": {"name": "steps"}})
        workflow["nodes"].append(node(30, "PrimitiveInt", [33, "fixed"], outputs=["INT"]))
        workflow["links"].append([30, 30, 0, 4, 4, "INT"])
        graph = api(workflow)
        assert graph["4"]["inputs"]["steps"] == ["30", 0]
        assert graph["30"]["inputs"] == {"value": 33}

    def test_the_button_of_an_upload_is_no_value(self, workflow: dict[str, Any]) -> None:
        workflow["nodes"].append(node(30, "LoadImage", ["a.png", "image"], outputs=["IMAGE", "MASK"]))
        assert api(workflow)["30"]["inputs"] == {"image": "a.png"}

    @pytest.mark.parametrize("saved", [["v/out", "mp4", "h264"], ["v/out", "mp4", "h264", "auto"]])
    def test_inputs_that_depend_on_a_choice(self, workflow: dict[str, Any], saved: list[str]) -> None:
        workflow["nodes"].append(node(30, "SaveVideo", saved, [("video", "VIDEO", None)]))
        inputs = api(workflow)["30"]["inputs"]
        assert inputs["format"] == "mp4"
        assert inputs["format.codec"] == "h264"
        assert inputs["format.codec.encoding"] == "auto"

    def test_a_prompt_is_sent_as_the_page_sends_it(self, workflow: dict[str, Any]) -> None:
        assert api(workflow)["2"]["inputs"]["text"] == "a red bird "
        workflow["nodes"][1]["widgets_values"] = ["{a {b|c}|d} \\{e|f\\}"]
        assert api(workflow)["2"]["inputs"]["text"] == "a b {e|f}"

    def test_a_choice_in_a_prompt_is_told(self, workflow: dict[str, Any], tmp_path: Path) -> None:
        (tmp_path / "w.json").write_text(json.dumps(workflow))
        (change,) = read_workflow(tmp_path / "w.json", INFO).changes
        assert "Node 2 (CLIPTextEncode)" in change
        assert "in text" in change
        workflow["nodes"][1]["widgets_values"] = ["a \\{red|green\\} bird // {one|two}"]
        assert to_api(workflow, INFO)[1] == []

    @pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.json")), ids=lambda path: path.stem)
    def test_templates_by_order_are_templates_by_name(self, path: Path) -> None:
        saved = json.loads(path.read_text(encoding="utf-8"))
        unknown = {each["type"] for each in saved["nodes"]} - set(INFO) - {"MarkdownNote"}
        if unknown:
            with pytest.raises(CannotConvert, match=min(unknown)):
                api(saved)
            saved["nodes"] = [each for each in saved["nodes"] if each["type"] not in unknown]
        by_name = api(saved)
        for each in saved["nodes"]:
            each.pop("widgets_values_named", None)
        assert api(saved) == by_name


class TestRefusing:
    def test_a_subgraph(self, workflow: dict[str, Any]) -> None:
        workflow["definitions"] = {"subgraphs": [{"id": "5f0e", "name": "Upscale"}]}
        workflow["nodes"].append(node(30, "5f0e"))
        with pytest.raises(CannotConvert, match=r"subgraph 'Upscale'.*Export \(API\)"):
            api(workflow)

    def test_a_node_that_comfyui_lacks(self, workflow: dict[str, Any]) -> None:
        workflow["nodes"].append(node(30, "SomebodysNode"))
        with pytest.raises(CannotConvert, match="SomebodysNode"):
            api(workflow)
        workflow["nodes"][-1]["mode"] = 2
        assert "30" not in api(workflow)

    def test_more_values_than_there_are_widgets(self, workflow: dict[str, Any]) -> None:
        workflow["nodes"][3]["widgets_values"].append(1.5)
        with pytest.raises(CannotConvert, match=r"Node 4 \(KSampler, 'Draw'\)"):
            api(workflow)

    def test_values_in_another_order(self, workflow: dict[str, Any]) -> None:
        workflow["nodes"][3]["widgets_values"] = [7, "randomize", "euler", 20, 3.5, "simple", 0.9]
        with pytest.raises(CannotConvert, match="'euler' was saved for steps"):
            api(workflow)

    def test_a_choice_that_comfyui_does_not_offer(self, workflow: dict[str, Any]) -> None:
        workflow["nodes"].append(node(30, "SaveVideo", ["v/out", "avi"], [("video", "VIDEO", None)]))
        with pytest.raises(CannotConvert, match="'avi'"):
            api(workflow)

    @pytest.mark.parametrize("text", ["{", "[]", "{}", '{"nodes": [{}]}', '{"1": {"class_type": "KSampler"}}'])
    def test_files_that_are_no_workflow(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "w.json").write_text(text)
        with pytest.raises(BenchError, match=r"w\.json"):
            read_workflow(tmp_path / "w.json", INFO)


class TestBeforeItBegins:
    """Hours of measuring come after these."""

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for name in ("w.json", "taken"):
            (tmp_path / name).write_text("{}")
        code = cli.main(["bench", str(tmp_path / "w.json"), "--out", str(tmp_path / "taken" / "out")])
        assert code == 2
        assert f"{tmp_path / 'taken'} is no folder" in capsys.readouterr().err

    @pytest.mark.parametrize("runs", ["0", "-1", "many"])
    def test_a_number_of_runs_that_is_none(self, capsys: pytest.CaptureFixture[str], runs: str) -> None:
        assert cli.main(["bench", "w.json", f"--runs={runs}"]) == 2
        assert f"{runs} is no number of runs" in capsys.readouterr().err


def test_paths_for_a_comfyui_that_is_started_are_those_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs in a folder of its own, where they would name something else."""
    monkeypatch.chdir(tmp_path)
    given = ["--cpu", "--output-directory", "out", "--extra-model-paths-config", "a.yaml", "/b.yaml", "--cuda-device",
             "0", "--input-directory=in", "--reserve-vram", "1.5"]  # fmt: skip
    assert with_absolute_paths(given) == [
        "--cpu", "--output-directory", str(tmp_path / "out"), "--extra-model-paths-config", str(tmp_path / "a.yaml"),
        "/b.yaml", "--cuda-device", "0", f"--input-directory={tmp_path / 'in'}", "--reserve-vram", "1.5",
    ]  # fmt: skip


class TestMakingItMeasurable:
    def test_without_a_node_of_monarch_a_split_is_put_before_the_sampler(self, workflow: dict[str, Any]) -> None:
        ready = measurable(api(workflow), INFO)
        graph = ready.for_run("tokens", "a")
        split = graph[graph["4"]["inputs"]["model"][0]]
        assert (split["class_type"], split["inputs"]["split"]) == ("MonarchSplit", "tokens")
        measure = graph[split["inputs"]["model"][0]]
        assert measure == {"class_type": "MonarchMeasure", "inputs": {"model": ["1", 0], "run": "a"}}
        (measured,) = [each for each in graph.values() if each["class_type"] == "MonarchMeasured"]
        assert measured["inputs"] == {"samples": ["4", 0], "run": "a"}
        assert any("node 4 (Draw)" in change for change in ready.changes)

    def test_modes_and_runs_differ_in_the_split_and_the_runs_name_alone(self, workflow: dict[str, Any]) -> None:
        ready = measurable(api(workflow), INFO)
        text = json.dumps(ready.for_run("one", "first"))
        assert text.count('"split": "off"') == 1
        assert text.replace("first", "second").replace('"split": "off"', '"split": "rows"') == json.dumps(
            ready.for_run("rows", "second")
        )

    def test_a_monarch_sampler_is_set_and_nothing_is_put_before_it_but_the_measuring(
        self, workflow: dict[str, Any]
    ) -> None:
        workflow["nodes"][3]["type"] = "MonarchSampler"
        workflow["nodes"][3]["widgets_values"].append("auto")
        ready = measurable(api(workflow), INFO)
        graph = ready.for_run("one", "a")
        assert graph["4"]["inputs"]["split"] == "off"
        assert graph["4"]["inputs"]["seed"] == 7
        assert graph[graph["4"]["inputs"]["model"][0]]["class_type"] == "MonarchMeasure"
        assert not [each for each in graph.values() if each["class_type"] == "MonarchSplit"]

    def test_a_guider_is_split_and_what_samples_with_it_is_kept(self) -> None:
        saved = json.loads((TEMPLATES / "with_sampler_custom_advanced.json").read_text(encoding="utf-8"))
        graph = measurable(api(saved), INFO).for_run("rows", "a")
        kinds = [each["class_type"] for each in graph.values()]
        assert kinds.count("MonarchSplit") == kinds.count("MonarchMeasure") == kinds.count("MonarchMeasured") == 1
        (measured,) = [each for each in graph.values() if each["class_type"] == "MonarchMeasured"]
        assert graph[measured["inputs"]["samples"][0]]["class_type"] == "SamplerCustomAdvanced"

    def test_a_sampler_beside_monarchs_is_computed_anew_and_not_split(self, workflow: dict[str, Any]) -> None:
        graph = api(workflow)
        graph["40"] = {"class_type": "MonarchSampler", "inputs": {**graph["4"]["inputs"], "latent_image": ["4", 0]}}
        graph["5"]["inputs"]["samples"] = ["40", 0]
        ready = measurable(graph, INFO).for_run("rows", "a")
        assert ready[ready["4"]["inputs"]["model"][0]]["class_type"] == "MonarchMeasure"
        assert ready[ready["40"]["inputs"]["model"][0]]["class_type"] == "MonarchMeasure"

    def test_a_sampler_behind_a_split_is_measured_once_around_both(self, workflow: dict[str, Any]) -> None:
        graph = api(workflow)
        graph["4"] = {"class_type": "MonarchSampler", "inputs": {**graph["4"]["inputs"], "split": "auto"}}
        graph["40"] = {"class_type": "MonarchSplit", "inputs": {"model": ["1", 0], "split": "auto"}}
        graph["4"]["inputs"]["model"] = ["40", 0]
        ready = measurable(graph, INFO).for_run("rows", "a")
        assert ready["4"]["inputs"]["model"] == ["40", 0]
        assert ready[ready["40"]["inputs"]["model"][0]]["class_type"] == "MonarchMeasure"
        assert ready["4"]["inputs"]["split"] == ready["40"]["inputs"]["split"] == "rows"

    def test_a_list_that_is_no_link_is_a_value(self, workflow: dict[str, Any]) -> None:
        graph = api(workflow)
        graph["3"]["inputs"]["points"] = ["1", "left"]
        assert measurable(graph, INFO).graph["3"]["inputs"]["points"] == ["1", "left"]

    def test_a_sampler_that_nothing_is_saved_of_is_left_alone(self, workflow: dict[str, Any]) -> None:
        graph = api(workflow)
        graph["50"] = copy.deepcopy(graph["4"])
        assert measurable(graph, INFO).graph["50"] == graph["50"]

    def test_nothing_to_sample(self, workflow: dict[str, Any]) -> None:
        graph = api(workflow)
        del graph["6"]
        with pytest.raises(BenchError, match="nothing to split"):
            measurable(graph, INFO)

    def test_a_comfyui_without_monarch(self, workflow: dict[str, Any]) -> None:
        bare = {name: each for name, each in INFO.items() if not name.startswith("Monarch")}
        with pytest.raises(BenchError, match="MonarchSampler"):
            measurable(api(workflow), bare)
