"""`import torch_metal_attn` is all that attn_implementation="metal_attn" needs."""

import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tests.helpers.forks import run_program  # noqa: E402
from tests.transformers import tiny_models as tiny  # noqa: E402
from torch_metal_attn.integrations import imports, registration  # noqa: E402

LOADS = """
from transformers import AutoModelForCausalLM
folder = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="metal_attn")
assert model.config._attn_implementation == "metal_attn"
saved = torch.load(folder + "/answer.pt")
with torch.no_grad():
    logits = model(input_ids=saved["ids"]).logits
assert (logits - saved["logits"]).abs().max() <= 1e-5
module = sys.modules["transformers.modeling_utils"]
assert type(module.__loader__) is type(module.__spec__.loader) is type(torch.__loader__)
waiting = [getattr(finder, "awaited", "") for finder in sys.meta_path]
assert not any(name.startswith("transformers") for name in waiting)
"""

TOO_OLD = """
import sys, warnings, torch_metal_attn
warnings.simplefilter("error")
import transformers.modeling_utils
assert transformers.modeling_utils.here
waiting = [getattr(finder, "awaited", "") for finder in sys.meta_path]
assert not any(name.startswith("transformers") for name in waiting)
print("unharmed", flush=True)
import torch_metal_attn.integrations.transformers
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder, ids, model = tmp_path_factory.mktemp("model"), tiny.tokens(), tiny.build("Llama")
    model.save_pretrained(folder)
    torch.save({"ids": ids, "logits": tiny.answer(model, input_ids=ids)}, folder / "answer.pt")
    return folder


@pytest.mark.parametrize(
    "first, second",
    [("torch_metal_attn", "transformers"), ("transformers.modeling_utils", "torch_metal_attn")],
)
def test_registers_in_either_order(first, second, saved):
    imports = f"import sys, torch, {first}\nassert {second!r} not in sys.modules\nimport {second}\n"
    done = run_program(imports + LOADS, saved)
    assert done.returncode == 0, done.stderr


def test_an_older_transformers_is_left_alone(tmp_path):
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "modeling_utils.py").write_text("here = True")
    done = run_program(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{TOO_OLD}")
    assert done.stdout == "unharmed\n"
    assert "ImportError: torch_metal_attn.integrations.transformers needs" in done.stderr


def test_from_pretrained_refuses_unsupported_models(tmp_path):
    config = transformers.BloomConfig(n_layer=1, hidden_size=16, n_head=2, vocab_size=99)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path)
    auto = transformers.AutoModelForCausalLM
    auto.from_pretrained(tmp_path)
    with pytest.raises(NotImplementedError, match=r"BloomForCausalLM .*would ignore"):
        auto.from_pretrained(tmp_path, attn_implementation="metal_attn")


@pytest.fixture
def stub(monkeypatch, tmp_path):
    package = tmp_path / "awaited_stub"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "models.py").write_text("import sys\nvalue = 3\nspec_loader = __spec__.loader\n")
    text = "from awaited_stub.models import value\nassert value == 3\n"
    (tmp_path / "integration_stub.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(registration, "_TRANSFORMERS_MODULE", "awaited_stub.models")
    monkeypatch.setattr(registration, "_TRANSFORMERS_INTEGRATION", "integration_stub")
    registration.register_with_transformers()
    yield package
    for name in ("awaited_stub", "awaited_stub.models", "integration_stub"):
        sys.modules.pop(name, None)


def waiting():
    finders = [finder for finder in sys.meta_path if isinstance(finder, imports._Finder)]
    return [finder for finder in finders if finder.awaited == registration._TRANSFORMERS_MODULE]


class TestFinder:
    def test_the_finder_is_removed_after_the_import(self, stub):
        before = [finder for finder in sys.meta_path if finder not in waiting()]
        registration.register_with_transformers()
        assert len(waiting()) == 1
        import awaited_stub

        assert "integration_stub" not in sys.modules
        import awaited_stub.models

        assert "integration_stub" in sys.modules
        assert sys.meta_path == before
        loader = type(awaited_stub.__loader__)
        models = awaited_stub.models
        for actual in (models.__loader__, models.__spec__.loader, models.spec_loader):
            assert type(actual) is loader

    def test_find_spec_returns_a_complete_loader(self, stub):
        spec = importlib.util.find_spec("awaited_stub.models")
        assert spec.loader.get_source("awaited_stub.models").startswith("import sys")
        assert waiting()

    def test_a_failed_import_can_be_repeated(self, stub):
        text = (stub / "models.py").read_text()
        (stub / "models.py").write_text("raise RuntimeError('planted')")
        with pytest.raises(RuntimeError, match="planted"):
            importlib.import_module("awaited_stub.models")
        assert waiting()
        assert "integration_stub" not in sys.modules
        (stub / "models.py").write_text(text)
        importlib.invalidate_caches()
        importlib.import_module("awaited_stub.models")
        assert "integration_stub" in sys.modules

    def test_a_finder_that_asks_the_others_does_not_recurse(self, stub):
        class Asking:
            def find_spec(self, name, path, target=None):
                others = (finder for finder in sys.meta_path if finder is not self)
                specs = (finder.find_spec(name, path, target) for finder in others)
                return next(filter(None, specs), None) if name == "awaited_stub.models" else None

        sys.meta_path.insert(0, Asking())
        sys.meta_path.insert(0, sys.meta_path.pop(1))
        importlib.import_module("awaited_stub.models")
        assert "integration_stub" in sys.modules

    def test_threads_that_import_at_once_register_once(self, stub):
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(importlib.import_module, ["awaited_stub.models"] * 8))
        assert "integration_stub" in sys.modules
        assert not waiting()

    def test_a_broken_integration_only_warns(self, stub):
        (stub.parent / "integration_stub.py").write_text("raise TypeError('another signature')")
        with pytest.warns(UserWarning, match="not available in this transformers.*another sign"):
            importlib.import_module("awaited_stub.models")
        assert sys.modules["awaited_stub.models"].value == 3

    def test_a_missing_module_raises_as_usual(self, stub):
        (stub / "models.py").unlink()
        with pytest.raises(ModuleNotFoundError, match=r"awaited_stub\.models"):
            importlib.import_module("awaited_stub.models")
