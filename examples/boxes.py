"""Untrusted code in boxes. Whatever it does, the caller gets an Execution with facts."""

import ringfence

PROGRAMS = {
    "works": "print(sum(range(10)))",
    "fails": "{}['missing']",
    "hangs": "while True: pass",
    "eats": "x = [0] * 10**9",
    "phones home": "import urllib.request; urllib.request.urlopen('http://192.0.2.1/', timeout=5)",
}

for name, code in PROGRAMS.items():
    execution = ringfence.run_code(code, timeout=2)
    error = execution.error.name if execution.error else "-"
    print(f"{name}: {execution.status}, {error}: {execution.facts['explanation']}")

code = "names = sorted(open('input/names')); open('output/sorted', 'w').writelines(names)"
made = ringfence.run_code(code, inputs={"names": "b\na\n"})
print([file["path"] for file in made.facts["files"]])
