"""The tree of a sample's calls: each stands on the tokens before it, and each token is trained on once."""

from hypothesis import given
from hypothesis import strategies as st

from drumroll.engines import Completion
from drumroll.sample import Owner
from drumroll.serve.traces import Calls

words = st.text("ab", max_size=1)
tokens = st.lists(st.integers(3, 9), min_size=1, max_size=4)
moves = st.lists(st.tuples(st.integers(0, 20), st.lists(words, min_size=1, max_size=2), words, tokens, tokens), max_size=12)


def play(moves):
    """Calls whose conversations go on from any earlier one, or from none, and what each was named."""
    calls, named = Calls(), []
    for where, extra, answer, added, written in moves:
        before = named[where % (len(named) + 1)] if where % (len(named) + 1) < len(named) else []
        marks = [*before, *extra]
        along = calls.along(marks)
        parent = along[-1] if along else None
        fitting = [i for i, name in enumerate(named) if marks[: len(name)] == name]
        longest = max((len(named[i]) for i in fitting), default=0)
        assert [call.place + 1 for call in along] == sorted({len(named[i]) for i in fitting})
        assert (parent.number if parent else None) == max((i for i in fitting if len(named[i]) == longest), default=None)
        done = Completion(written, [-0.5] * len(written), [len(named)] * len(written))
        calls.add(parent, added, done, [*marks, answer])
        named.append([*marks, answer])
    return calls


@given(moves)
def test_every_token_written_is_trained_on_once_after_exactly_what_was_seen(moves):
    calls = play(moves)
    traces, turns = calls.traces()
    assert len(turns) == len(calls.all)
    for call, turn in zip(calls.all, turns, strict=True):
        trace = traces[turn.trace]
        assert trace.tokens[: turn.start] == call.seen()
        assert trace.tokens[turn.start : turn.end] == call.written.tokens
        assert set(trace.owners[turn.start : turn.end]) == {Owner.POLICY}
        assert trace.versions[turn.start : turn.end] == call.written.versions
    trained = sum(owner is Owner.POLICY for trace in traces for owner in trace.owners)
    assert trained == sum(len(call.written.tokens) for call in calls.all)


@given(moves)
def test_a_trace_is_what_a_last_call_saw_and_wrote(moves):
    calls = play(moves)
    traces, _ = calls.traces()
    leaves = [call for call in calls.all if not any(other.parent is call for other in calls.all)]
    assert [trace.tokens for trace in traces] == [call.after() for call in leaves]
    assert all(trace.owners[0] is Owner.PROMPT for trace in traces)


def test_a_fork_repeats_what_it_shares_as_its_prompt():
    calls = Calls()
    first = calls.add(None, [1, 2], Completion([3], [-1.0], [0]), ["u", "a"])
    calls.add(first, [4], Completion([5], [-1.0], [0]), ["u", "a", "v", "b"])
    calls.add(first, [6], Completion([7], [-1.0], [0]), ["u", "a", "w", "c"])
    traces, _ = calls.traces()
    assert [trace.tokens for trace in traces] == [[1, 2, 3, 4, 5], [1, 2, 3, 6, 7]]
    assert "".join(owner.name[0] for owner in traces[0].owners) == "PPPEP"  # prompt, prompt, policy, environment, policy
    assert [owner is Owner.POLICY for owner in traces[0].owners] == [False, False, True, False, True]
    assert [owner is Owner.POLICY for owner in traces[1].owners] == [False, False, False, False, True]
