"""How notebooks show results: as tables, which are made when they are asked for."""

__all__ = ["Shown"]


class Shown:
    """A notebook shows it as tables, which ``report/notebook.py`` makes."""

    def _repr_html_(self) -> str:
        from .report.notebook import html_of

        return html_of(self)
