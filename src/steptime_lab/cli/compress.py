"""``steptime compress``: bytes and time of a product with narrow, sparse and low-rank weights on a device."""

from __future__ import annotations

from typing import Annotated, Final

from steptime.cli import options as o
from steptime.cli.parser import flag, number

LARGEST: Final = 1 << 24


def command(
    tokens: Annotated[int, number("--tokens", "N", "Rows of the activations; default 1.", 1, LARGEST)] = 1,
    rows: Annotated[int, number("--rows", "N", "Outputs of the weight; default 16384.", 1, LARGEST)] = 16384,
    columns: Annotated[int, number("--columns", "N", "Inputs of the weight; default 4096.", 1, LARGEST)] = 4096,
    device: Annotated[
        str, flag("--device", catalogue="device", help="Catalogue name or TOML file; default h100-sxm.")
    ] = "h100-sxm",
    ranks: Annotated[int, number("--ranks", "N", "Data ranks that add up gradients; default 8.", 2, 10**6)] = 8,
    link: Annotated[str, flag("--link", metavar="'N GB/s'", help="Bandwidth of their links.")] = "50 GB/s",
    json: o.Json = False,
) -> None:
    """Quantised, sparse and low-rank weights of one product: bytes, time, what pays and why not.

    Times are rooflines at the efficiencies of the device. Nothing here says what a scheme does to a model's quality.
    """
    from steptime.cli.output import document, print_json
    from steptime.hardware import load_device
    from steptime.units import parse
    from steptime_lab.compress import compressed, training

    found = load_device(device)
    schemes = compressed(tokens, rows, columns, found)
    step = training(tokens, rows, columns, found, ranks=ranks, link_Bps=parse(link, "Bps"))
    if json:
        print_json(
            document(device=found.name, tokens=tokens, rows=rows, columns=columns, schemes=schemes, training=step)
        )
        return
    from steptime.report import text as t
    from steptime.units import format_bytes, format_seconds, format_si

    out = t.console()
    out.print(t.printable(f"{tokens} tokens, weight {rows} x {columns}, {found.title}"), soft_wrap=True)
    table = t.grid(["weights", "bytes", "smaller", "time", "faster", "pays"], left=(0, 5))
    for row in schemes:
        time = "" if row.time_s is None else format_seconds(row.time_s)
        faster = "" if row.speedup is None else f"{row.speedup:.2f} x"
        pays = "yes" if row.pays else "no units" if row.time_s is None else "no"
        table.add_row(row.scheme, format_bytes(row.weight_bytes), f"{row.ratio:.2f} x", time, faster, pays)
    out.print(table)
    for row in schemes:
        if row.why:
            t.indented(out, f"{row.scheme}: {row.why}", 2)
    t.heading(out, "Training")
    for line in (
        f"quantisation-aware: {format_seconds(step.aware_s)} on top of {format_seconds(step.step_s)} of dense products",
        f"gradient over {ranks} ranks at {link}: {format_seconds(step.gradient_wide_s)} in 16 bits, "
        f"{format_seconds(step.gradient_narrow_s)} in 8",
        f"8 bits pay on links below {format_si(step.break_even_Bps, 'B/s')}",
    ):
        t.indented(out, line, 2)
