"""What a notebook shows once it has run, without a kernel: pictures and text, and no error or warning."""

SAYS = {
    "01_chunks": ("maximal_chunks", "Probe of gs://", "samples/s predicted", "price of sharing", "median ratio"),
    "02_streaming": ("in block order: mixing", "data wait", "requests/sample"),
}
"""What a notebook is for, in words of its outputs."""


def assert_pictures_and_text(name, notebook):
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    bundles = [output.data for output in outputs if "data" in output]
    shown = "\n".join(str(bundle.get("text/plain")) for bundle in bundles)
    assert [words for words in SAYS.get(name, ()) if words not in shown] == []
    assert any("image/png" in bundle for bundle in bundles)
    speaking = [bundle for bundle in bundles if "kit-saved" not in bundle.get("text/html", "")]  # not a style rule
    assert all(bundle.get("text/plain") for bundle in speaking)
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
