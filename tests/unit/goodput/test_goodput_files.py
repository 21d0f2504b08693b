"""Files of failures and prices: what they change, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptime.errors import UserError
from steptime.goodput.objective import budget_of
from steptime.goodput.operations import operations_of
from steptime.goodput.prices import prices_of
from steptime.hardware import load_device

PRICES = """
source = "quote 17"
date = "2026-01-15"
[device_hour]
h100-sxm = "2.00 EUR/h"
b200-sxm = { price = "€4/h", date = 2026-02-01 }
[site]
electricity = "0.20 EUR/kWh"
pue = 1.1
carbon = "50 g/kWh"
host_power = "250 W"
"""
FAILURES = """
source = "our log"
date = "2026-01-15"
[mtbf]
device = "50000 h"
host = "1000 days"
[checkpoint]
kind = "sync"
store_bandwidth = "1 TB/s"
[spares]
nodes = 3
"""


def written(folder: Path, text: str) -> str:
    path = folder / "given.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_prices(tmp_path: Path) -> None:
    found = prices_of(written(tmp_path, PRICES))
    assert (found.currency, found.kWh, found.pue, found.carbon_kg_per_kWh, found.host_W) == ("EUR", 0.2, 1.1, 0.05, 250)
    price = found.of(load_device("b200-sxm"))
    assert (price.value, price.date, price.source) == (4.0, "2026-02-01", "quote 17") and not found.assumed
    assert prices_of("default").assumed
    with pytest.raises(UserError, match="no price for l40s"):
        found.of(load_device("l40s"))


@pytest.mark.parametrize(("old", "new", "word"), [
    ('"2.00 EUR/h"', "2.0", "no unit"),
    ('"2.00 EUR/h"', '"2.00 EUR"', "another unit"),
    ('"2.00 EUR/h"', '"2.00 USD/h"', "EUR and USD"),
    ('"2.00 EUR/h"', '"2.00 EUR/kWh"', "another unit"),
    ('date = "2026-01-15"', "", "date"),
    ('date = "2026-01-15"', 'date = "last week"', "no date"),
    ('source = "quote 17"', "", "source"),
    ("pue = 1.1", "pue = 0.5", "pue"),
    ('"250 W"', "250", "no unit"),
    ('"50 g/kWh"', '"50 EUR/kWh"', "another unit"),
    ("[site]", "[sites]", "did you mean site"),
    ("pue = 1.1", "pua = 1.1", "site.pua: unknown key\n  valid: electricity, carbon, pue"),
    ('price = "€4/h", ', "", "device_hour.b200-sxm.price: is missing"),
    ("date = 2026-02-01", "date = 2026-02-01T08:00:00", "device_hour.b200-sxm.date: datetime.datetime(2026"),
])  # fmt: skip
def test_prices_refused(tmp_path: Path, old: str, new: str, word: str) -> None:
    assert old in PRICES
    with pytest.raises(UserError) as error:
        prices_of(written(tmp_path, PRICES.replace(old, new)))
    assert word in str(error.value)


def test_failures(tmp_path: Path) -> None:
    ops = operations_of(written(tmp_path, FAILURES))
    assert ops.mtbf_s == {"device": 5e4 * 3600, "host": 1000 * 86400.0} and ops.spread == 0.0
    assert (ops.kind, ops.store_Bps, ops.spares) == ("sync", 1e12, 3) and "spares" not in ops.assumed
    assert ops.job_mtbf_s(8, 8) == pytest.approx(1 / (8 / (5e4 * 3600) + 1 / (1000 * 86400)))
    only = operations_of(written(tmp_path, 'base = "bloom"\n[restart]\ntime = "1 h"\n'))
    assert only.restart_s == 3600 and set(only.mtbf_s) == {"any"} and "restart_s" not in only.assumed


@pytest.mark.parametrize(("old", "new", "word"), [
    ('"50000 h"', "50000", "no unit"),
    ('"50000 h"', '"50000 GB"', "unit of bytes"),
    ('date = "2026-01-15"', "", "date"),
    ('kind = "sync"', 'kind = "snc"', "did you mean sync"),
    ("[spares]\nnodes = 3", "[spares]\nnodes = 2.5", "whole number"),
    ("[mtbf]", "mtbf = 1\n[mtbx]", "unknown|mtbf|no key"),
    ("[mtbf]", "[mtbf]\nspread = -1", "mtbf.spread: -1 is not a number from 0"),
    ("[mtbf]", 'base = "blom"\n[mtbf]', "did you mean bloom"),
    ('kind = "sync"', "kind = ['sync']", "checkpoint.kind: ['sync'] is not a text"),
])  # fmt: skip
def test_failures_refused(tmp_path: Path, old: str, new: str, word: str) -> None:
    with pytest.raises(UserError) as error:
        operations_of(written(tmp_path, FAILURES.replace(old, new)))
    assert any(each in str(error.value) for each in word.split("|"))


def test_names_are_corrected() -> None:
    with pytest.raises(UserError, match="did you mean llama3-h100"):
        operations_of("lama3-h100")
    with pytest.raises(UserError, match="default"):
        prices_of("defualt")


@pytest.mark.parametrize("given", ["2M", "2", "USD 2", "2 EUR", "0 USD"])
def test_a_budget_has_a_currency(given: str) -> None:
    with pytest.raises(UserError, match="budget"):
        budget_of(given, "USD")
