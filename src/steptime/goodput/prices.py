"""Prices of devices and electricity, PUE, carbon: from a user's file, or assumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from steptime.errors import FieldError, UnknownNameError, UserError, shown
from steptime.goodput.tables import DATED, ORIGIN, catalogue, rate, user_table
from steptime.hardware.records import Device
from steptime.schema import Field, Table, checked, text

_CARBON: Final = rate("kWh", "kg")
_HOUR: Final = rate("h")


def _price(given: object) -> Any:
    """A price, or a table of a price with its own source."""
    return checked(given, _PRICE, "") if isinstance(given, Mapping) else {"price": _HOUR(given)}


_PRICE: Final = Table(rows={"price": _HOUR, **ORIGIN}, required=("price",))
_SITE: Final = Table(
    rows={
        "electricity": rate("kWh"),
        "carbon": _CARBON,
        "pue": Field(low=1.0, high=10.0, example="1.2"),
        "host_power": Field(dimension="W", low=0.0, high=1e5, example="300 W"),
        "host_power_share": Field(low=0.0, high=10.0, example="0.4"),
    }
)
_FILE: Final = Table(
    rows={**ORIGIN, "kind": text(), "device_hour": Table(named=_price), "site": _SITE}, required=ORIGIN, hint=DATED
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Price of one device per hour."""

    value: float
    currency: str
    source: str
    date: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices and the site, each with its source."""

    source: str
    date: str
    assumed: bool
    """True: the catalogue's prices."""
    devices: Mapping[str, Price]
    currency: str
    kWh: float
    """Price of a kilowatt hour; 0: included in the price of the device."""
    pue: float
    carbon_kg_per_kWh: float
    host_W: float | None
    """Power of hosts, switches and fans per device."""
    host_share: float
    """Power of hosts, switches and fans over the TDP of the device, if ``host_W`` is None."""

    def of(self, device: Device) -> Price:
        """Price of a device.

        Raises:
            UserError: there is none.
        """
        for name in (device.name, device.like):
            if name is not None and name in self.devices:
                return self.devices[name]
        hint = f'write a file with source, date and [device_hour] {device.name} = "2.50 USD/h"; it has '
        raise UserError(f"no price for {device.name} in {self.source}", hint=hint + (", ".join(self.devices) or "none"))

    def host_power_W(self, tdp_W: float) -> float:
        """Power of hosts, switches and fans per device."""
        return self.host_share * tdp_W if self.host_W is None else self.host_W


def prices_of(given: Any) -> Prices:
    """Prices from a file, or for ``default`` the catalogue's, which are assumed.

    Raises:
        UserError: the file is wrong: a number without unit, no date, no source, two currencies, an unknown key.
    """
    if isinstance(given, Prices):
        return given
    if not isinstance(given, str):
        raise FieldError("", "prices", f"{shown(given)} is no path", hint="give default or FILE.toml")
    own = given != "default"
    if own and not given.endswith(".toml"):
        raise UnknownNameError("prices", given, ["default", "FILE.toml"])
    document = user_table(given, "prices") if own else catalogue("prices.toml")
    return _read(given if own else "prices.toml", document, assumed=not own)


def _read(where: str, document: Mapping[str, Any], *, assumed: bool) -> Prices:
    found = checked(document, _FILE, where)
    origin = {key: found[key] for key in ORIGIN}
    devices = {}
    for name, given in found.get("device_hour", {}).items():
        value, currency = given["price"]
        devices[name] = Price(value=value, currency=currency, **{key: given.get(key, origin[key]) for key in ORIGIN})
    site, base = found.get("site", {}), catalogue("prices.toml")["site"]
    carbon, _ = site.get("carbon") or _CARBON(base["carbon"])
    kWh, coin = site.get("electricity", (0.0, "USD"))
    coins = sorted({price.currency for price in devices.values()} | ({coin} if kWh else set()))
    if len(coins) > 1:
        raise FieldError(where, "device_hour", f"prices in {' and '.join(coins)}", hint="give all in one currency")
    return Prices(
        **origin,
        assumed=assumed,
        devices=devices,
        currency=(coins or ["USD"])[0],
        kWh=kWh,
        carbon_kg_per_kWh=carbon,
        pue=site.get("pue", base["pue"]),
        host_W=site.get("host_power"),
        host_share=site.get("host_power_share", base["host_power_share"]),
    )
