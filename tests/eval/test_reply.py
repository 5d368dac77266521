"""An answer while it grows: what is fed, what counts as said, when it ends."""

from __future__ import annotations

from offload.bench.eval.reply import PART_TOKENS, Reply

END, DOT = 99, 50


def test_what_is_given_is_fed_first() -> None:
    reply = Reply([4, 5], lambda said: said[-1] == END, 10)
    reply.hear(1)  # the choice behind what was read: more of the prompt comes
    assert [reply.next_token()] == [4]
    reply.hear(2)
    assert [reply.next_token()] == [5]
    reply.hear(3)
    assert (reply.tokens, reply.next_token()) == ([3], 3)
    assert not reply.is_done
    reply.hear(END)
    assert (reply.tokens, reply.is_done, reply.num_steps) == ([3, END], True, 3)


def test_it_asks_itself_by_what_it_has_said() -> None:
    reply = Reply(
        [],
        lambda said: said[-1] == END,
        10,
        questions=[lambda said: [*said, 70]],
        ends_part=lambda token: token in (DOT, END),
    )
    reply.hear(11)
    reply.next_token()
    reply.hear(12)
    reply.next_token()
    reply.hear(DOT)  # which is left out: the question comes in its place
    assert reply.tokens == [11, 12, 11, 12, 70]
    fed = []
    while reply.num_given:
        fed.append(reply.next_token())
        reply.hear(20)
    assert fed == [11, 12, 70]
    assert (reply.tokens[-1], reply.next_token()) == (20, 20)
    reply.hear(END)
    assert reply.is_done


def test_ends_of_their_own() -> None:
    reply = Reply([], lambda said: False, PART_TOKENS + 2, questions=[lambda said: [7]])
    for _ in range(PART_TOKENS + 1):
        reply.hear(1)
    assert reply.tokens == [1] * PART_TOKENS + [7]
    reply.next_token()
    reply.hear(2)
    assert (reply.tokens[-1], reply.is_done) == (2, True)  # as many as it may have
