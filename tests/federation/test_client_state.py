"""Client state between rounds: the version that the server accepted, on disk and in memory."""

from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
import pytest

from fedeas_flwr.federation.client_state import ClientState, ClientStore, forget_kept_states, kept_states_writer


def test_client_state_starts_from_the_version_the_server_accepted(tmp_path: Path) -> None:
    store = ClientStore(tmp_path / "3")
    assert store.load(0) == ClientState()
    store.save(2, ClientState((1, 5)), still_needed=(0, 0))
    store.save(4, ClientState((1, 9)), still_needed=(0, 0))  # round 2's reply was lost: the server still asks for 0
    assert store.load(0) == ClientState()
    assert store.load(4).generate == (1, 9)
    store.save(6, ClientState((1, 14)), still_needed=(4, 4))
    assert store.load(4).generate == (1, 9)  # round 6's reply may yet be lost
    store.save(8, ClientState((1, 20)), still_needed=(6, 4))
    assert store.load(6).generate == (1, 14)
    assert store.load(4).generate == (1, 9)  # the server's checkpoint is older: a resume asks for round 4
    store.save(9, ClientState((1, 21)), still_needed=(8, 8))
    with pytest.raises(RuntimeError, match=r"round 4: .* cannot be read"):
        store.load(4)  # no longer needed by the server or its checkpoints


def test_client_state_stores_an_empty_plan(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    store.save(1, ClientState((0, 0, 0)), still_needed=())
    assert store.load(1).generate == (0, 0, 0)


@pytest.mark.parametrize("owner, number", [("run/1", 1), ("other/0", 1), ("run/0", 2)])
def test_a_state_of_another_run_client_or_round_is_refused(tmp_path: Path, owner: str, number: int) -> None:
    ClientStore(tmp_path, "run/0").save(1, ClientState((1,)), still_needed=())
    (tmp_path / "state-000001.safetensors").rename(tmp_path / f"state-{number:06d}.safetensors")
    with pytest.raises(RuntimeError, match="does not match its digest"):
        ClientStore(tmp_path, owner).load(number)


def test_client_state_stores_algorithm_arrays(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    store.save(1, ClientState((2,), {"c/w": np.float32([1, 2])}), still_needed=())
    found = ClientStore(tmp_path).load(1)
    assert np.array_equal(found.memory["c/w"], np.float32([1, 2]))
    store.save(2, ClientState((3,)), still_needed=())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state-000002.safetensors"]
    store.save(3, ClientState((3,), {"w": np.float32([1])}), still_needed=())
    (tmp_path / "state-000003.safetensors").write_bytes(b"half")
    with pytest.raises(RuntimeError, match=r"round 3: .* cannot be read"):
        store.load(3)


def test_repeated_round_overwrites_the_stored_state(tmp_path: Path) -> None:
    """A repeated round on a GPU is not bitwise identical, so the first version must not stay."""
    try:
        ClientStore(tmp_path, in_memory=True).save(1, ClientState((1,), {"w": np.float32([1])}), (0, 0))
        kept_states_writer()()
        forget_kept_states()  # killed here; the resumed run repeats round 1
        ClientStore(tmp_path, in_memory=True).save(1, ClientState((1,), {"w": np.float32([2])}), (0, 0))
        kept_states_writer()()
        forget_kept_states()
        assert float(ClientStore(tmp_path).load(1).memory["w"][0]) == 2
    finally:
        forget_kept_states()


def test_states_in_memory_are_bounded_by_max_bytes(tmp_path: Path) -> None:
    stores, alive = [ClientStore(tmp_path / str(client), in_memory=True) for client in range(5)], []
    try:
        for number, store in enumerate(stores, 1):
            array = np.full(1000, number, np.float32)
            alive.append(weakref.ref(array))
            store.save(number, ClientState((number,), {"w": array}), still_needed=(0, 0))
        del array
        assert all(array() is not None for array in alive), "arrays not yet on disk were dropped"
        kept_states_writer(max_bytes=3 * 4000)()
        assert [array() is not None for array in alive] == [False, False, True, True, True]
        assert [float(store.load(number).memory["w"][0]) for number, store in enumerate(stores, 1)] == [1, 2, 3, 4, 5]
        stores[0].save(6, ClientState((9,), {"w": np.zeros(1000, np.float32)}), still_needed=(1, 1))
        kept_states_writer(max_bytes=3 * 4000)()
        assert [stores[0].load(number).generate for number in (1, 6)] == [(1,), (9,)]
    finally:
        forget_kept_states()


def test_states_in_memory_are_written_at_each_checkpoint(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, in_memory=True)
    try:
        store.save(1, ClientState((2,), {"w": np.float32([1])}), still_needed=(0, 0))
        assert not list(tmp_path.iterdir())
        assert store.load(1).generate == (2,)
        kept_states_writer()()  # the checkpoint after round 1
        store.save(3, ClientState((4,), {"w": np.float32([3])}), still_needed=(1, 1))
        store.save(4, ClientState((5,), {"w": np.float32([4])}), still_needed=(3, 1))
        kept_states_writer()()  # the server may die now, with round 1's checkpoint, or later, with round 4's
        forget_kept_states()
        again = ClientStore(tmp_path, in_memory=True)
        assert [again.load(number).generate for number in (1, 3, 4)] == [(2,), (4,), (5,)]
        assert float(again.load(4).memory["w"][0]) == 4
        again.save(6, ClientState((9,)), still_needed=(4, 4))  # after a resume, round 4's state is only on disk
        kept_states_writer()()
        assert sorted(path.stem for path in tmp_path.glob("*.safetensors")) == ["state-000004", "state-000006"]
    finally:
        forget_kept_states()


def test_only_states_saved_since_the_last_checkpoint_are_written(tmp_path: Path) -> None:
    """At a checkpoint nothing is done for the clients that did not train since the last one."""
    stores = [ClientStore(tmp_path / str(client), in_memory=True) for client in range(2)]
    try:
        for store in stores:
            store.save(2, ClientState((2,)), still_needed=(1, 1))
        kept_states_writer()()
        for store in stores:
            store.write(0, ClientState())  # an old version, which the next clean-up of its folder deletes
        stores[1].save(3, ClientState((3,)), still_needed=(2, 2))
        kept_states_writer()()
        files = [sorted(path.stem[-1] for path in store.folder.glob("*.safetensors")) for store in stores]
        assert files == [["0", "2"], ["2", "3"]]
    finally:
        forget_kept_states()


def test_state_on_disk_is_not_written_again(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, in_memory=True)
    try:
        store.save(1, ClientState((1,)), still_needed=(0, 0))
        kept_states_writer()()
        (tmp_path / "state-000001.safetensors").unlink()
        store.save(2, ClientState((2,)), still_needed=(1, 1))
        kept_states_writer()()
        assert [path.stem for path in tmp_path.glob("*.safetensors")] == ["state-000002"]
    finally:
        forget_kept_states()


def test_states_saved_during_a_write_are_kept_for_the_next(tmp_path: Path) -> None:
    """The next round trains while the states of a checkpoint are written."""
    stores = [ClientStore(tmp_path / str(client), in_memory=True) for client in range(3)]
    try:
        for store in stores:
            store.save(1, ClientState((1,), {"w": np.float32([1])}), still_needed=(0, 0))
        write = kept_states_writer(max_bytes=0)
        stores[0].save(2, ClientState((2,), {"w": np.float32([2])}), still_needed=(1, 0))
        write()
        assert [[path.stem[-1] for path in store.folder.glob("*.safetensors")] for store in stores] == [["1"]] * 3
        assert float(stores[0].load(2).memory["w"][0]) == 2, "a version that was never written was dropped"
        kept_states_writer(max_bytes=0)()
        forget_kept_states()
        assert [stores[0].load(number).generate for number in (1, 2)] == [(1,), (2,)]
    finally:
        forget_kept_states()


def test_states_of_a_failed_write_are_written_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ClientStore(tmp_path / "0", in_memory=True)
    try:
        store.save(1, ClientState((1,)), still_needed=(0, 0))
        with monkeypatch.context() as patch, pytest.raises(OSError):
            patch.setattr(ClientStore, "write", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
            kept_states_writer()()
        kept_states_writer()()
        forget_kept_states()
        assert store.load(1).generate == (1,)
    finally:
        forget_kept_states()
