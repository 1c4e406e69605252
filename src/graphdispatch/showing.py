"""How people are shown amounts: in units that fit."""

__all__ = ["count", "milliseconds", "percent", "storage"]


def percent(share: float, digits: int = 1) -> str:
    """``0.125`` as ``12.5 %``."""
    return f"{100 * share:.{digits}f} %"


def milliseconds(time_ms: float) -> str:
    """A time in the unit that fits it."""
    if time_ms >= 1000:
        return f"{time_ms / 1e3:.1f} s"
    return f"{time_ms:.{3 if time_ms < 10 else 2 if time_ms < 100 else 0}f} ms"


def storage(amount: float) -> str:
    """Bytes in the unit that fits them."""
    for unit in ("B", "KiB", "MiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.2f} GiB"


def count(number: float) -> str:
    """A number of things, with separated thousands. A weight that is not a whole number gets four digits."""
    return f"{number:,.0f}" if number == int(number) else f"{number:,.4g}"
