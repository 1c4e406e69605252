"""``Profile``: kept whole, and refused where it is damaged."""

import json
from pathlib import Path

import pytest

from graphdispatch.errors import ConfigError
from graphdispatch.plan import CostModel
from graphdispatch.plan.profile import Profile

PROFILE = Profile.of((4, 16), {9: 2.5, 3: 1.0}, CostModel.default())


def test_a_profile_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    """Sizes, traffic and costs; nothing else is left in the folder."""
    PROFILE.save(tmp_path / "profile.json")
    loaded = Profile.load(str(tmp_path / "profile.json"))
    assert loaded == PROFILE
    assert loaded.traffic == {3: 1.0, 9: 2.5}
    assert loaded.workload.counts.tolist() == [1.0, 2.5]
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"format": "graphdispatch.plan"}, "at format"),
        ({"version": 2}, "at version"),
        ({"more": 1}, "at more"),
        ({"sizes": []}, "at sizes.*at least one"),
        ({"sizes": [16, 4]}, "at sizes.*increasing"),
        ({"sizes": [4, 10**9]}, r"at sizes\.1"),
        ({"rows": [3]}, "a weight for each"),
        ({"rows": [3, 3]}, "at rows.*increasing"),
        ({"weights": [1.0, 0.0]}, r"at weights\.1"),
        ({"weights": [1.0, float("inf")]}, "at weights|at the whole"),
        ({"weights": ["1", 2.0]}, r"at weights\.0"),
        ({"cost": {}}, "at cost"),
    ],
)
def test_a_hostile_profile_is_refused(changes: dict[str, object], match: str, tmp_path: Path) -> None:
    """One ``ConfigError`` that names the file and the field."""
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(json.loads(PROFILE.model_dump_json(exclude_none=True)) | changes))
    with pytest.raises(ConfigError, match=rf"bad\.json is not valid .*({match})"):
        Profile.load(path)


@pytest.mark.parametrize("kept", [0, 1, 100, -2])
def test_a_truncated_profile_is_refused(kept: int, tmp_path: Path) -> None:
    """Wherever it ends."""
    path = tmp_path / "bad.json"
    path.write_text(PROFILE.model_dump_json()[:kept])
    with pytest.raises(ConfigError, match=r"bad\.json is not valid"):
        Profile.load(path)
