"""Random results of replays from hypothesis, plausible or not: what a report must be able to show."""

from hypothesis import strategies as st

from kvblocks.replay import result as R

NASTY = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "&lt;b&gt;",
    "a\x00b\x1b[31m",
    "\ud800",
    "\u202egnp.exe",
]

counts = st.integers(0, 10**12)
seconds = st.floats(0, 1e7)
shares = st.floats(0, 1)
names = st.one_of(st.sampled_from([*NASTY, "lru", "slru", "x" * 200, ""]), st.text(max_size=20))
maybe = lambda strategy: st.one_of(st.none(), strategy)  # noqa: E731

facts = st.builds(
    R.TraceFacts,
    name=names,
    source_format=names,
    num_requests=counts,
    num_sessions=counts,
    num_references=counts,
    num_unique_blocks=counts,
    block_size=st.integers(1, 4096),
    duration_s=seconds,
    infinite_hit_rate=shares,
    num_other_tokens=counts,
)
conditions = st.builds(
    R.Conditions,
    version=names,
    python=names,
    mean_arrival_s=maybe(seconds),
    groups=maybe(names),
    host_blocks=maybe(counts),
)
moments = st.lists(
    st.builds(R.Moment, seconds, *[st.integers(0, 10**6)] * 7),
    max_size=5,
)
ages = st.lists(st.builds(R.Bucket, upto=maybe(seconds), count=counts), max_size=5)
misses = st.builds(R.Misses, *[counts] * 7, ages=ages)
fixed_orders = st.builds(R.FixedOrder, hit_rate=shares, bound=shares, attainable=maybe(shares))
rows = st.builds(
    R.Row,
    policy=names,
    num_blocks=st.integers(1, 10**9),
    share=shares,
    hit_rate=shares,
    device_hit_rate=shares,
    bound=shares,
    attainable=maybe(shares),
    tokens=st.builds(R.Tokens, counts, counts, counts, counts),
    waits=st.builds(R.Waits, counts, seconds, seconds, seconds, counts),
    misses=misses,
    moments=moments,
    fixed_order=maybe(fixed_orders),
    num_evicted=counts,
    num_policy_failures=counts,
    wall_s=seconds,
)


def nodes(children):
    return st.builds(R.PrefixNode, *[st.integers(0, 1000)] * 4, names, counts, counts, children)


prefixes = st.recursive(nodes(st.just([])), lambda below: nodes(st.lists(below, max_size=3)), max_leaves=10)
results = st.builds(R.Result, facts, conditions, st.lists(rows, max_size=4), prefixes)


def make_result(name: str = "a trace") -> R.Result:
    """A result such as a replay finds, small: two policies, three sizes; `name` wherever a trace has a name."""

    def row(policy: str, number: int, rate: float) -> R.Row:
        references = 10_000
        missed = round(references * (1 - rate))
        first, rest = min(missed, 800), max(0, missed - 800)
        moments = [
            R.Moment(60.0 * i, i % 7, i % 5, i % 3, 5 * number, 10 * number, 7 * number, 100, int(100 * rate))
            for i in range(1, 100)
        ]
        counted = R.Misses(first, rest // 2, rest // 4, rest // 8, 3, 5, 0, [R.Bucket(1.0, 10), R.Bucket(None, 30)])
        tokens = R.Tokens(512 * references, 512 * missed, 512 * (references - missed), 512 * number)
        waits = R.Waits(60 // number, 1.5 / number, 20.0 / number, 30.0, 2)
        fixed = R.FixedOrder(rate, min(1.0, rate + 0.1), None)
        return R.Row(
            policy,
            100 * number,
            number / 100,
            rate,
            rate,
            rate + 0.05,
            1 - 0.3 / number,
            tokens,
            waits,
            counted,
            moments,
            fixed,
            9,
            0,
            1.0,
        )

    trace = R.TraceFacts(name, "kvblocks", 500, 40, 10_000, 8_000, 512, 6_000.0, 0.92)
    used = R.Conditions("1.0", False, "3.12.0", "poisson", 60.0, 1, True, "gemma3-4b", 5_000)
    leaves = [R.PrefixNode(20, 30 - i, 60 - i, 1, f"{name} {i}") for i in range(6)]
    root = R.PrefixNode(0, 0, 500, 40, "all", children=[R.PrefixNode(0, 20, 400, 30, "30 sessions", children=leaves)])
    rates = {"lru": (0.2, 0.5, 0.8), name: (0.3, 0.55, 0.79)}
    return R.Result(
        trace, used, [row(policy, 2**i, rate) for policy, found in rates.items() for i, rate in enumerate(found)], root
    )
