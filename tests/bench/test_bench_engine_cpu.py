"""The bench of the engine on a CPU runs at a small size. Its kept results name the best product."""

import json

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from bench.engine_cpu import products


def test_products_of_few_rows_are_compared(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    kept = tmp_path / "products.json"
    assert products.main(["--quick", "--rounds", "1", "--rows", "1", "--json", str(kept)]) == 0
    rows = json.loads(kept.read_text())["results"]
    names = {row["product"] for row in rows}
    assert {products.READING, "F.linear", "weights as [in, out]"} <= names and "numpy" not in names
    assert "numpy is left out: expected OPENBLAS_NUM_THREADS=1" in capsys.readouterr().out
    contestants = [row for row in rows if row["product"] != products.READING]
    assert max(row["of_the_best"] for row in contestants) == 1
    assert all(row["least_ms"] <= row["median_ms"] <= row["most_ms"] for row in rows)


def test_the_best_is_a_product_and_neither_reading_nor_a_step():
    found = {products.READING: [1.0], products.STEP: [8.0, 10.0, 30.0], "a": [5.0], "b": [4.0]}
    shares = {row["product"]: row["of_the_best"] for row in products.make_rows(found, 1, 10**9)}
    assert shares == {products.READING: 4.0, products.STEP: 0.4, "a": 0.8, "b": 1.0}
