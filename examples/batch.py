"""Many programs at once: candidate answers of a model, each tried on each test in a box of its own."""

import ringfence

CANDIDATES = {
    "recursive": "def factorial(n): return 1 if n < 2 else n * factorial(n - 1)",
    "off by one": "def factorial(n): return 1 if n < 2 else (n - 1) * factorial(n - 1) + n",
    "endless": "def factorial(n):\n while n % 2: pass\n return {0: 1, 6: 720}[n]",
    "misspelt": "def factorial(n): return n * factroial(n - 1)",
}
TESTS = ["factorial(0) == 1", "factorial(1) == 1", "factorial(5) == 120", "factorial(6) == 720"]

programs = [f"{code}\nassert {test}" for code in CANDIDATES.values() for test in TESTS]
executions = ringfence.map_code(programs, timeout=5)
for number, name in enumerate(CANDIDATES):
    those = executions[number * len(TESTS) : (number + 1) * len(TESTS)]
    errors = sorted({execution.error.name for execution in those if execution.error})
    passed = sum(execution.status == "success" for execution in those)
    print("; ".join([f"{name}: passed {passed} of {len(TESTS)}", *errors]))
