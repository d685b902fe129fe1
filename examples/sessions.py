"""An agent's work, step by step, in one sandbox: files come in, each step builds on the last, a result comes out."""

import tempfile
from pathlib import Path

from ringfence import Sandbox

SALES = {
    "north.csv": "date,amount\n2026-01-31,10\n2026-02-28,20\n",
    "south.csv": "date,amount\n31/01/2026,30\n28/02/2026,40\n",
}
STEPS = (
    """
import csv, datetime, pathlib
def day(text):
    form = "%d/%m/%Y" if "/" in text else "%Y-%m-%d"
    return datetime.datetime.strptime(text, form).date()
rows = [row for path in sorted(pathlib.Path("data").glob("*.csv")) for row in csv.DictReader(path.open())]
len(rows)""",
    """
months = {}
for row in rows:
    months.setdefault(f"{day(row['date']):%Y-%m}", []).append(int(row["amount"]))
months""",
    """
averages = {month: sum(found) / len(found) for month, found in months.items()}
pathlib.Path("output").mkdir()
with open("output/report.csv", "w") as file:
    csv.writer(file).writerows([("month", "average"), *averages.items()])
averages""",
)

with Sandbox.create(metadata={"example": "sessions"}) as sandbox, tempfile.TemporaryDirectory() as folder:
    sandbox.files.write_files({f"data/{name}": text for name, text in SALES.items()})
    for step in STEPS:
        execution = sandbox.run_code(step, timeout=10)
        print(f"step {execution.step}: {execution.text}")

    wrong = sandbox.run_code("averages['2026-03']")
    print(f"step {wrong.step}: {wrong.status}, {wrong.error.name}; the variables are still there")

    sandbox.files.download("output", folder)
    print(Path(folder, "report.csv").read_text().split())
