"""The queue of prompts."""

import threading

from laneformer.infer.serve.processes.questions import SHORT, Questions
from laneformer.infer.serve.worker import Question


def question(size, client="a"):
    made = Question("x" * size, False, None, {}, (), False, {}, client=client)
    return client, made.size, made


def test_clients_take_turns_and_short_prompts_come_first():
    made = Questions()
    for number, (size, client) in enumerate([(9000, "a"), (5, "a"), (7, "a"), (100, "b")]):
        made.put(number, *question(size, client))
    order = [made.take(False)[0] for _ in range(4)]
    assert order == [1, 3, 2, 0]


def test_thread_for_short_prompts_takes_no_long_one():
    made, taken = Questions(), []
    made.put(1, *question(SHORT + 10))
    thread = threading.Thread(target=lambda: taken.append(made.take(True)[0]))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    made.put(2, *question(3))
    thread.join(10)
    assert taken == [2] and made.take(False)[0] == 1


def test_dropped_questions_are_not_answered():
    made, stopped = Questions(), []
    made.put(1, *question(1))
    made.put(2, *question(2))
    made.drop(1)
    number, _ = made.take(False, lambda: stopped.append(True))
    assert number == 2 and not stopped
    made.drop(2)
    made.drop(3)
    assert stopped == [True] and not made.done(2)
    made.put(4, *question(1))
    assert made.take(False)[0] == 4 and made.done(4)


def test_size_counts_what_is_inside():
    made = Questions()
    chat = Question([{"role": "user", "content": "x" * SHORT}], True, None, {}, (), False, {})
    made.put(1, chat.client, chat.size, chat)
    made.put(2, *question(100))
    assert made.take(False)[0] == 2
