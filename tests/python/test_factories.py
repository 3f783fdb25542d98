"""Tests of models and datasets that the configuration names by a factory function."""

import factories
import pytest
import torch

import accelmgr

SHAPE = {"nprocs": 2, "batch_size_per_device": 1, "runners__threads": 1}


def config(model="factories:model", data="factories:data", of_model=None, of_data=None):
    return {
        "model": {"kind": "python", "factory": model, **(of_model or {})},
        "data": {"kind": "python", "factory": data, **(of_data or {})},
    }


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_a_configuration_alone_makes_a_manager(start_method):
    with accelmgr.Manager(config=config(), start_method=start_method, seed_base=5, **SHAPE) as manager:
        assert manager.model is None
        ((name, scale),) = manager.named_parameters()
        torch.manual_seed(5)
        assert name == "scale" and torch.equal(scale, factories.model().scale.detach())
        result = manager.step()
        assert result.loss == pytest.approx(0.5 * scale.mean().item())
        assert len(list(manager.steps())) == 3  # One pass over 8 elements.


def test_options_are_its_keywords(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {kind: python, factory: 'factories:model', options: {count: 5}}\n"
        "data: {kind: python, factory: 'factories:data', options: {count: 2}, epochs: 3}\n"
    )
    with accelmgr.Manager(config=file, **SHAPE) as manager:
        assert manager.named_parameters()[0][1].shape == (5,)
        assert len(list(manager.steps())) == 3


def test_one_of_both_may_be_passed():
    model = factories.model()
    with accelmgr.Manager(model, config={"data": config()["data"]}, **SHAPE) as manager:
        assert manager.step().loss == pytest.approx(0.5 * model.scale.mean().item())
    with accelmgr.Manager(dataset=factories.data(), config={"model": config()["model"]}, **SHAPE) as manager:
        assert manager.step().ok


REFUSED = {
    "model": {
        "": (accelmgr.ConfigError, "model.factory is empty.*package.module:function"),
        "factories": (accelmgr.ConfigError, "model.factory is 'factories'; it must be package.module:function"),
        "nowhere.models:make": (accelmgr.ConfigError, "'nowhere.models:make': there is no module 'nowhere'"),
        "factories:nothing": (accelmgr.ConfigError, "'factories:nothing': <module 'factories'.*> has no 'nothing'"),
        "factories:NOT_CALLABLE": (accelmgr.ConfigError, "NOT_CALLABLE', which is a int and cannot be called"),
        "factories:text": (
            accelmgr.ModelError,
            "factories:text returned 'no model', a str; it must return a torch.nn.",
        ),
        "factories:broken": (accelmgr.ModelError, "LookupError: no weights here"),
        "factories:without_parameters": (accelmgr.ModelError, "the model has no parameters"),
    },
    "data": {
        "factories:text": (accelmgr.DataError, "factories:text returned 'no model', a str; it must return something"),
        "factories:broken": (accelmgr.DataError, "LookupError: no weights here"),
        "factories:batches": (accelmgr.DataError, "factories:batches returned a DataLoader that makes batches"),
        "factories:quantized_data": (accelmgr.DataError, "field '<element>' of the dataset is qint8, a dtype that"),
    },
}


@pytest.mark.parametrize(("what", "factory"), [(what, factory) for what in REFUSED for factory in REFUSED[what]])
def test_what_makes_no_model_or_dataset_is_named(what, factory):
    error, message = REFUSED[what][factory]
    with pytest.raises(error, match=message):
        accelmgr.Manager(config=config(**{what: factory}), **SHAPE)


def test_a_generator_has_one_epoch():
    with pytest.raises(accelmgr.ConfigError, match="data.epochs is 2, but the dataset is a generator"):
        accelmgr.Manager(config=config(data="factories:endless", of_data={"epochs": 2}), **SHAPE)


def test_what_is_neither_passed_nor_configured_is_named():
    with pytest.raises(accelmgr.ModelError, match=r"Manager\(\) without a model: pass .*model.kind"):
        accelmgr.Manager(None, factories.data())
    with pytest.raises(accelmgr.DataError, match=r"Manager\(\) without a dataset: pass .*data.kind"):
        accelmgr.Manager(factories.model())


def test_a_module_and_a_factory_are_one_too_many():
    with pytest.raises(accelmgr.ConfigError, match="model.factory has no effect"):
        accelmgr.Manager(factories.model(), factories.data(), model__factory="factories:model", **SHAPE)
