"""Where the weights of a run come from: weights that nothing loads end it, and a run that saves nothing says so."""

import logging
from types import SimpleNamespace

import pytest
from support.errors import one_line

from torchtitan_magi.training.settings import first_weights
from torchtitan_magi.training.settings.first_weights import check_first_weights

OFF = dict.fromkeys(["enable", "load_only", "initial_load_in_hf", "last_save_in_hf", "create_seed_checkpoint"], False)
OFF |= {"enable_first_step_checkpoint": False, "initial_load_in_hf_quantized": False}
OFF |= {"folder": "checkpoint", "load_step": -1, "initial_load_path": None}
ON = {"enable": True}
READ = ON | {"initial_load_in_hf": True}


def groups(*rates):
    """As torchtitan 0.3 has them."""
    return SimpleNamespace(param_groups=[SimpleNamespace(optimizer_kwargs={"lr": rate}) for rate in rates])


def job(folder, random_weights=False, lr=1e-5, **checkpoint):
    return SimpleNamespace(
        optimizer=SimpleNamespace(lr=lr) if isinstance(lr, float) else groups(*lr),
        job=SimpleNamespace(dump_folder=str(folder / "run")),
        model=SimpleNamespace(hf_assets_path=str(folder / "model")),
        checkpoint=SimpleNamespace(**OFF | checkpoint),
        magi=SimpleNamespace(random_weights=random_weights),
    )


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    return tmp_path


def put(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")


def problem_of(*args, **kwargs):
    with one_line("") as caught:
        check_first_weights(job(*args, **kwargs))
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "model-00001-of-00004.safetensors", "model.safetensors.index.json", "pytorch_model.bin"],
)
def test_weights_that_nothing_loads_end_the_run(folder, name):
    put(folder, f"model/{name}")
    beginning = f"model.hf_assets_path is '{folder}/model', which holds weights ({name}), but nothing loads them; add "
    end = "initial_load_in_hf = true to [checkpoint], or random_weights = true to [magi] to train random ones"
    assert problem_of(folder) == f"{beginning}enable = true and {end}"
    assert problem_of(folder, **ON) == f"{beginning}{end}"
    put(folder, "run/checkpoint/step-2/__0_0.distcp")  # which is not finished
    assert problem_of(folder, **ON) == f"{beginning}{end}"


@pytest.mark.parametrize(
    ("options", "names", "source"),
    [
        (READ, ["model/model.safetensors"], "those of {}/model, in safetensors"),
        (READ | {"initial_load_path": "/other"}, ["model/model.safetensors"], "those of /other, in safetensors"),
        (ON | {"initial_load_path": "/other"}, ["model/model.safetensors"], "those of /other"),
        (ON | {"create_seed_checkpoint": True}, ["model/model.safetensors"], "random, for a seed checkpoint"),
        ({"random_weights": True}, ["model/model.safetensors"], "random, as magi.random_weights says"),
        (
            READ | {"enable": False, "random_weights": True},
            ["model/a.safetensors"],
            "random, as magi.random_weights says",
        ),
        ({}, ["model/config.json", "model/adapter_model.safetensors"], "random, as nothing is loaded"),
        (ON, ["model/a.safetensors", "run/checkpoint/step-7/.metadata", "run/checkpoint/step-20/.metadata"], "step-20"),
        (ON | {"random_weights": True}, ["run/checkpoint/step-7/.metadata"], "step-7"),
        (ON | {"load_step": 7}, ["run/checkpoint/step-7/.metadata", "run/checkpoint/step-20/.metadata"], "step-7"),
    ],
)
def test_the_log_says_where_weights_come_from(folder, caplog, options, names, source):
    caplog.set_level(logging.INFO)
    put(folder, *names)
    check_first_weights(job(folder, **options))
    if source.startswith("step-"):
        source = f"those of {{}}/run/checkpoint/{source}, where this run goes on"
    assert caplog.messages[0].startswith(f"Weights: {source.format(folder)}")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"initial_load_in_hf": True},
            "checkpoint.initial_load_in_hf is true, but checkpoint.enable is false, without ",
        ),
        (
            {"initial_load_path": "/other"},
            "checkpoint.initial_load_path is '/other', but checkpoint.enable is false, w",
        ),
        ({"load_step": 3}, "checkpoint.load_step is 3, but checkpoint.enable is false, without which nothing is lo"),
        ({"create_seed_checkpoint": True}, "checkpoint.create_seed_checkpoint is true, but checkpoint.enable is false"),
        (
            ON | {"initial_load_in_hf_quantized": True},
            "checkpoint.initial_load_in_hf_quantized is true, but checkpoint.initial_load_in_hf is false; set that to",
        ),
        (
            ON | {"create_seed_checkpoint": True, "load_only": True},
            "checkpoint.create_seed_checkpoint is true, but with checkpoint.load_only nothing is saved; set that to",
        ),
        (
            ON | {"load_step": 3},
            "checkpoint.load_step is 3, but {}/run/checkpoint has no finished checkpoint; set job.d",
        ),
        (READ | {"random_weights": True}, "magi.random_weights is true, but checkpoint.initial_load_in_hf is true; le"),
        (
            ON | {"initial_load_path": "/other", "random_weights": True},
            "magi.random_weights is true, but checkpoint.initial_load_path is '/other'; leave one of them out",
        ),
    ],
)
def test_an_option_that_asks_in_vain_ends_the_run(folder, options, said):
    assert problem_of(folder, **options).startswith(said.format(folder))


def test_a_seed_checkpoint_is_of_one_process(folder, monkeypatch):
    monkeypatch.setattr(first_weights, "rank_and_size", lambda: (0, 2))
    said = "checkpoint.create_seed_checkpoint is true, but torchrun started 2 processes; start one, with"
    assert problem_of(folder, **ON, create_seed_checkpoint=True).startswith(said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "This run saves nothing, not even at its end: checkpoint.enable is false"),
        (READ | {"load_only": True}, "This run saves nothing, not even at its end: checkpoint.load_only is true"),
        (
            {"last_save_in_hf": True, "enable_first_step_checkpoint": True},
            "This run saves nothing, not even at its end: checkpoint.enable is false, so that last_save_in_hf and "
            "enable_first_step_checkpoint have no effect",
        ),
        (ON, None),
    ],
)
def test_a_run_that_saves_nothing_says_so(folder, caplog, options, said):
    check_first_weights(job(folder, **options))
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ([said] if said else [])


@pytest.mark.parametrize(
    ("options", "names", "is_warned"),
    [
        (READ, [], True),
        (READ | {"lr": (1e-5, 8e-4)}, [], True),
        (READ, ["run/checkpoint/step-7/.metadata"], False),  # it was told when it began
        (READ | {"lr": 8.1e-4}, [], False),
        (ON, [], False),
    ],
)
def test_the_default_learning_rate_over_trained_weights_is_warned_of(folder, caplog, options, names, is_warned):
    put(folder, *names)
    check_first_weights(job(folder, **{"lr": 8e-4} | options))
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.split(",")[0] for line in warnings] == ["optimizer.lr is 0.0008"] * is_warned


def test_only_rank_0_speaks_and_all_ranks_must_agree(folder, caplog, monkeypatch):
    from torchtitan_magi.training.process import all_ranks
    from torchtitan_magi.training.settings import first_weights

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(first_weights, "is_first_rank", lambda: False)
    monkeypatch.setattr(all_ranks._Meeting, "gathered", lambda _, mine: [mine, mine])
    check_first_weights(job(folder))
    assert not caplog.messages
    monkeypatch.setattr(all_ranks._Meeting, "gathered", lambda _, mine: [(None, "weights those of x"), mine])
    ranks = (
        "weights those of x on rank 0, weights random, as nothing is loaded on rank 1; give every rank the same data"
    )
    assert problem_of(folder).endswith(f"has {ranks}")
