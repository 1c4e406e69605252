"""What mkdocs does besides: it puts the pictures into the pages, where they take the theme's colours, light or dark."""

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
PICTURE = re.compile(r'<img [^>]*src="[^"]*pictures/(\w+)\.svg"[^>]*>')


def on_page_content(html: str, **_: Any) -> str:
    """The page with each picture's SVG in the place of its image."""
    return PICTURE.sub(lambda found: (DOCS / "pictures" / f"{found[1]}.svg").read_text().strip(), html)
