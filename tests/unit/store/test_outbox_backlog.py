"""What a process remembers of its outbox between two commits."""

from berth.store.outbox import OutboxBacklog


def test_a_batch_can_be_written_off_when_all_of_it_is_published() -> None:
    backlog = OutboxBacklog()
    backlog.stored([1, 2])
    backlog.stored([3])
    assert backlog.whole_batches() == []
    backlog.published([1, 3])
    assert backlog.whole_batches() == [3]
    backlog.published([2])
    assert backlog.whole_batches() == [1, 3]
    backlog.written_off([1, 3])
    assert backlog.whole_batches() == []
    assert backlog.not_written_off() == []


def test_rows_of_another_process_are_remembered_until_they_are_marked() -> None:
    backlog = OutboxBacklog()
    backlog.published([7, 8])
    assert backlog.whole_batches() == []
    assert sorted(backlog.not_written_off()) == [7, 8]
