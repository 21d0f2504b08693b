"""The curve of a device, kernel family, dtype and timer, or the next best one.

Where there is none, the next best is taken, in this order: a sibling dtype of the device, the same curve transferred
from other devices, the other timer, another dtype. Each step away makes the band wider.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from steptime.errors import UserError
from steptime.hardware.library import device_named
from steptime.hardware.profiles import TIMERS, load_profile, profile_names
from steptime.hardware.records import ALIKE, Curve, Device, Profile
from steptime.lab.calibrate.transfer import transferred_curve, widened

#: Log error (standard deviation) that each step away from the right curve adds; choice of this program.
SIBLING_ERROR, TIMER_ERROR, DTYPE_ERROR = 0.1, 0.5, 0.5


@dataclass(slots=True)
class Known:
    """The profiles of the catalogue, and what was derived from them."""

    profiles: dict[str, Profile]
    devices: dict[str, Device]
    transferred: dict[tuple[str, str, str, str], Curve | None] = field(default_factory=dict)

    @classmethod
    def load(cls) -> Known:
        """All profiles of devices that the catalogue has."""
        profiles = {p.device: p for name in profile_names() if (p := load_profile(name)) is not None}
        devices = {name: device for name in profiles if (device := device_of(name)) is not None}
        return cls({name: profiles[name] for name in devices}, devices)

    def curve(self, device: Device, family: str, dtype: str, timer: str) -> tuple[Curve, str] | None:
        """The nearest curve, ready for the dtype, and how it was come by; None if no device has one."""
        for place, like, clock, error in self._choices(family, dtype, timer):
            found = (self._own if place == "own" else self._transferred)(device, family, like, clock)
            if found is not None:
                origin = (
                    place + ("" if clock == timer else ", other timer") + ("" if like == dtype else ", other dtype")
                )
                return replace(found, dtype=dtype, band=widened(found.band, error)) if error else found, origin
        return None

    def _choices(self, family: str, dtype: str, timer: str) -> Iterator[tuple[str, str, str, float]]:
        """Place, dtype and timer of curves, the best first, and the log error that each adds."""
        siblings = [ALIKE[dtype]] if dtype in ALIKE else []
        for clock in (timer, *(t for t in TIMERS if t != timer)):
            late = 0.0 if clock == timer else TIMER_ERROR
            for place in ("own", "transferred"):
                yield place, dtype, clock, late
                yield from ((place, like, clock, late + SIBLING_ERROR) for like in siblings)
        dtypes = {c.dtype for p in self.profiles.values() for c in p.curves if c.family == family}
        for like in sorted(dtypes - {dtype, *siblings}):
            yield from ((place, like, timer, DTYPE_ERROR) for place in ("own", "transferred"))

    def _own(self, device: Device, family: str, dtype: str, timer: str) -> Curve | None:
        own = self.profiles.get(device.name)
        curve = own.curve(family, dtype, timer) if own else None
        return curve if curve is not None and curve.kind != "assumed" else None

    def _transferred(self, device: Device, family: str, dtype: str, timer: str) -> Curve | None:
        key = (device.name, family, dtype, timer)
        if key not in self.transferred:
            others = {n: p.curve(family, dtype, timer) for n, p in self.profiles.items() if n != device.name}
            fitted = {n: c for n, c in others.items() if c is not None and c.kind == "fitted"}
            self.transferred[key] = transferred_curve(device, fitted, self.devices) if fitted else None
        return self.transferred[key]


def device_of(gpu: str) -> Device | None:
    """The device with that spelling in the catalogue; none too where its file cannot be read."""
    try:
        return device_named(gpu) if gpu else None
    except UserError:
        return None
