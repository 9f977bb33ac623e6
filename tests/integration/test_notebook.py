"""The notebook of examples/, executed cell by cell in a kernel as Jupyter would."""

from pathlib import Path

import nbclient
import nbformat

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


def shown(cell, kind):
    """What the outputs of a cell show in a format; of a format that has none, an empty text."""
    return "".join(output.data.get(kind, "") for output in cell.outputs if "data" in output)


def test_a_notebook_trains_with_a_function_and_a_frame_plots_and_loads_the_model(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    checks = nbformat.v4.new_code_cell(
        "history == [m['reward/sums'] for m in run.metrics[1:]], run.objects['correct']['source']"
    )
    mistake = nbformat.v4.new_code_cell("drumroll.train({})", metadata={"tags": ["raises-exception"]})
    notebook.cells += [checks, mistake]
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    _, training, plotted, _, table, model, again, checked, told = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert "6 steps in" in shown(training, "text/html")  # the progress, which ended as one output
    kinds = [output.output_type for output in training.outputs if output.output_type != "stream"]  # tqdm misses widgets
    assert kinds == ["display_data", "execute_result"]
    assert shown(training, "text/plain").count("finished, step 6 of 6") == 1
    assert shown(plotted, "text/html").count("<polyline") >= 3
    assert "completion" in shown(table, "text/html")
    assert shown(model, "text/plain").startswith("'3+4=")
    assert "eval/sums" in shown(again, "text/plain")
    assert shown(checked, "text/plain").startswith("(True,")
    assert "def correct(completion" in shown(checked, "text/plain")
    assert [output.traceback for output in told.outputs] == [
        ["ConfigError: the key 'data' is missing; `drumroll explain data` says what it is."]
    ]
    assert (tmp_path / "runs" / "notebook" / "summary.json").exists()
