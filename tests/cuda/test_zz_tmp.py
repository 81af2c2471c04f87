from by_path import load
m = load("tests/cuda/test_every_format.py"); every=m.every
IQ=[f for f in every.ALL if f.name.startswith(("iq1","iq2","iq3"))]
def test_few(sim_module): m.check(sim_module, m.cases("f32", IQ), ("2-8",), checked=False)
def test_mma(sim_module): m.check(sim_module, m.cases("bf16", IQ), ("9-64",), checked=False)
def test_rows(sim_module):
    made=[c for layout,dtype in (("canonical","f32"),(m.weights.LAYOUT,"bf16")) for c in every.cases(dtype,layout,IQ)]
    m.check_rows(sim_module, made)
def test_texts():
    for f in IQ:
        for dt in every.DTYPES:
            case = every.case_of(f, 768, dt, m.weights.LAYOUT); t=m.weights.weight_of("k", case.operand).definitions
            print(f.name, dt, "pairs" , "pairs = true" in t, "fold", "return fmaf(biased, " in t, "sum", "return fmaf(biased - " in t)
