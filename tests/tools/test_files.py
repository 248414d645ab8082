"""Files that are whole or not there."""

import pytest

from cactus_kernels.tools.files import replacing


def test_a_file_is_whole_or_as_it_was(tmp_path):
    path = tmp_path / "f"
    path.write_text("before")
    with pytest.raises(RuntimeError), replacing(str(path)) as file:
        file.write(b"half")
        raise RuntimeError
    assert path.read_text() == "before" and [x.name for x in tmp_path.iterdir()] == ["f"]
