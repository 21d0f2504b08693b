"""Prices of devices and electricity, PUE, carbon: from a user's file, or assumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from steptime.errors import FieldError, UnknownNameError, UserError, shown
from steptime.goodput.tables import catalogue, numbers, origin, rate, subtable, user_table
from steptime.hardware.records import Device
from steptime.schema import Field

_SITE: Final = {
    "pue": Field(record="pue", low=1.0, high=10.0, required=False, example="1.2"),
    "host_power": Field(record="host_W", dimension="W", low=0.0, high=1e5, required=False, example="300 W"),
    "host_power_share": Field(record="host_share", low=0.0, high=10.0, required=False, example="0.4"),
}
_TOP: Final = ("source", "date", "kind", "device_hour", "site")


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What one device costs per hour."""

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
    """Whether they are those of the catalogue."""
    devices: Mapping[str, Price]
    currency: str
    kWh: float
    """Price of a kilowatt hour; 0: the price of the device has it."""
    pue: float
    carbon_kg_per_kWh: float
    host_W: float | None
    """Power of hosts, switches and fans per device."""
    host_share: float
    """The same over the TDP of the device, where ``host_W`` is None."""

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
    """Prices by the path of a file, or ``default``: those of the catalogue, which are assumed.

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
    for key in document:
        if key not in _TOP:
            raise UnknownNameError(f"key of {where}", str(key), _TOP)
    stated = origin(where, document)
    devices = {
        name: _price(where, f"device_hour.{name}", given, stated)
        for name, given in subtable(where, document, "device_hour").items()
    }
    site = dict(subtable(where, document, "site"))
    base = catalogue("prices.toml")["site"]
    carbon, _ = rate(where, "site.carbon", site.pop("carbon", base["carbon"]), "kWh", "kg")
    kWh, coin = rate(where, "site.electricity", site.pop("electricity", "0 USD/kWh"), "kWh")
    coins = sorted({price.currency for price in devices.values()} | ({coin} if kWh else set()))
    if len(coins) > 1:
        raise FieldError(where, "device_hour", f"prices in {' and '.join(coins)}", hint="give all in one currency")
    values = numbers(where, site, _SITE, "site.")
    return Prices(
        **stated,
        assumed=assumed,
        devices=devices,
        currency=(coins or ["USD"])[0],
        kWh=kWh,
        carbon_kg_per_kWh=carbon,
        pue=values.get("pue", base["pue"]),
        host_W=values.get("host_W"),
        host_share=values.get("host_share", base["host_power_share"]),
    )


def _price(where: str, field: str, given: Any, around: Mapping[str, Any]) -> Price:
    table = given if isinstance(given, Mapping) else {"price": given}
    for key in table:
        if key not in ("price", "source", "date"):
            raise UnknownNameError(f"key of {field}", str(key), ("price", "source", "date"))
    value, currency = rate(where, field, table.get("price"), "h")
    return Price(value=value, currency=currency, **origin(where, table, around))
