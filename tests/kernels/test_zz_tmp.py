from by_path import load
every = load("tests/kernels/test_every_format.py")
IQ=[f for f in every.ALL if f.name.startswith(("iq1","iq2","iq3"))]
def test_large(build, harness): every.check_all(build, every.best_isa(harness), list(every.cases("bf16", None, IQ)), ("large",))
def test_one(build, harness): every.check_all(build, every.best_isa(harness), list(every.cases("f32", None, IQ)), ("1","2-8"))
def test_rows(build, harness):
    for lay in ("canonical", None): every.check_rows(build, every.best_isa(harness), list(every.cases("f32", lay, IQ)))
