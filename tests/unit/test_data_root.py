"""Where the bulk measurements are looked for."""

import pytest

from steptime.errors import UserError
from steptime.study import data_root as module


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with nothing beside it, and no variable."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    monkeypatch.setattr(module, "_CHECKOUT", folder)
    monkeypatch.delenv(module.VARIABLE, raising=False)
    return folder


def test_without_a_folder_there_is_none(checkout):
    assert module.data_root() is None
    with pytest.raises(UserError, match=r"kernels\.parquet") as caught:
        module.require_data("kernels.parquet")
    assert module.VARIABLE in str(caught.value)


def test_the_folder_beside_the_checkout_is_found(checkout):
    folder = checkout.parent / "shared" / "data"
    folder.mkdir(parents=True)
    assert module.data_root() == folder
    (checkout / "pyproject.toml").unlink()
    assert module.data_root() is None


def test_the_variable_wins(checkout, monkeypatch, tmp_path):
    (checkout.parent / "shared" / "data").mkdir(parents=True)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "a.csv").touch()
    monkeypatch.setenv(module.VARIABLE, str(mine))
    assert module.data_root() == mine
    assert module.require_data("a.csv") == mine / "a.csv"
    with pytest.raises(UserError, match=r"b\.csv(.|\n)*a\.csv"):
        module.require_data("b.csv")


@pytest.mark.parametrize("given", ["nowhere", "pyproject.toml"])
def test_a_variable_that_names_no_folder_is_a_user_error(checkout, monkeypatch, given):
    monkeypatch.setenv(module.VARIABLE, str(checkout / given))
    with pytest.raises(UserError, match=module.VARIABLE):
        module.data_root()


def test_an_empty_variable_counts_as_unset(checkout, monkeypatch):
    monkeypatch.setenv(module.VARIABLE, "")
    assert module.data_root() is None
