"""Queue stores with one rule broken each: the queue suite finds every one of them."""

from __future__ import annotations

import pytest

from pxrs.core.queue import WorkQueue
from pxrs.stores.memory.queues import MemoryQueues
from pxrs.stores.memory.stores import MemoryStores
from pxrs.testing.clock import VirtualClock
from pxrs.testing.conformance import MemoryLab, queue_checks, run_suite
from support import broken_holds as holds
from support import broken_key_order as order
from support import broken_waits as waits

pytestmark = pytest.mark.engine("memory")


def store(broken: type[MemoryQueues], *checks: str) -> list[tuple[type[MemoryQueues], str]]:
    return [(broken, check) for check in checks]


def inner(broken: type[WorkQueue], *checks: str) -> list[tuple[type[MemoryQueues], str]]:
    return store(order.with_queue(broken), *checks)


BROKEN: list[tuple[type[MemoryQueues], str]] = [
    *store(
        holds.FenceIgnoresTheDelivery,
        "check_fence_knows_the_delivery",
        "check_fence_knows_the_future",
    ),
    *store(holds.FenceIgnoresTheTransaction, "check_fence_knows_the_holder"),
    *store(holds.FenceIgnoresTheHolder, "check_fence_knows_the_holder"),
    *store(
        holds.FenceIgnoresTheSession,
        "check_fence_knows_the_session",
        "check_unknown_sessions_hold_nothing",
    ),
    *store(holds.FenceIgnoresTheDeadline, "check_fence_knows_the_deadline"),
    *store(holds.AnybodyReleases, "check_fence_knows_the_holder"),
    *store(
        holds.AnybodyExtends, "check_fence_knows_the_holder", "check_a_zombie_is_fenced_by_its_heir"
    ),
    *store(holds.ExtendsWhatItCan, "check_extension_is_all_or_nothing"),
    *store(holds.ExtendsFromTheTake, "check_extension_holds_on"),
    *store(holds.ExtendsInSilence, "check_a_shorter_hold_wakes"),
    *store(holds.AppliesOneByOne, "check_a_lost_item_undoes_the_whole_change"),
    *store(holds.RemovesWhatItCan, "check_a_lost_item_undoes_the_whole_change"),
    *store(holds.PutsDespiteTheFence, "check_a_lost_item_undoes_the_whole_change"),
    *store(holds.PutsDespiteTheFence, "check_a_refused_change_leaves_no_dedupe_key"),
    *store(holds.ExaminesBeforeTheLock, "check_commit_races_with_a_release"),
    *store(holds.ExaminesBeforeTheLock, "check_commit_races_with_the_sessions_end"),
    *store(holds.DeadSessionsKeepLocks, "check_locks_vanish_with_the_session", "check_reap_frees"),
    *store(holds.DeadSessionsKeepLocks, "check_expiry_wakes_a_sleeper"),
    *store(holds.HandsOutWhatItRemembers, "check_deleted_items_are_handed_out_by_nobody"),
    *store(
        holds.HoldersAreKnownByTheQueuesName,
        "check_holds_in_a_queue_made_again_end_with_their_session",
    ),
    *store(holds.LateHoldersKeepLocks, "check_fence_knows_the_deadline", "check_reap_frees"),
    *store(holds.FreesOneTransactionOnly, "check_locks_vanish_with_the_session"),
    *store(holds.DiesInSilence, "check_expiry_wakes_a_sleeper", "check_every_kind_of_change_wakes"),
    *store(holds.ForgetsUnitsWithTheSession, "check_evidence_outlives_the_session"),
    *store(holds.RemembersTheLatestUnits, "check_units_are_remembered"),
    *store(
        holds.SaysNeverForNow,
        "check_never_is_final",
        "check_never_is_final_for_plain_puts",
        "check_a_late_take_holds_nothing",
    ),
    *store(holds.SaysNeverOfWhatIsForgotten, "check_evidence_outlives_the_session"),
    *store(holds.LetsLateTakesHold, "check_a_late_take_holds_nothing"),
    *store(holds.GivesUpTheWholeTransaction, "check_a_given_up_take_harms_no_other"),
    *store(holds.UnitsOfAnySession, "check_units_belong_to_their_session"),
    *store(holds.ForgetsTheCountsToo, "check_what_is_forgotten_still_counts"),
    *store(holds.RemembersRefusedUnits, "check_refused_units_were_never_done"),
    *store(holds.PutsNeedASession, "check_a_put_needs_no_session"),
    *store(holds.CountsAtTheEnd, "check_deliveries_are_counted_before_the_hand_out"),
    *store(holds.CountsAtTheEnd, "check_most_is_an_upper_bound"),
    *store(holds.IgnoresMost, "check_most_is_an_upper_bound", "check_the_used_up_die_once"),
    *store(holds.KeepsTheFirstMost, "check_most_is_each_takers_own"),
    *store(holds.HandsOutOneTooMany, "check_most_is_an_upper_bound"),
    *store(holds.SuspectsGoWithOthers, "check_suspects_are_handed_out_alone"),
    *store(holds.SuspectsGoWithOthers, "check_poison_burns_no_innocent_counts"),
    *store(holds.SuspectsGoToAnybody, "check_suspects_go_to_who_wants_them"),
    *store(holds.SuspectsAreKeptSecret, "check_suspects_go_to_who_wants_them"),
    *store(holds.SuspectsAreCountedUnseen, "check_suspects_go_to_who_wants_them"),
    *store(
        holds.SuspectsLetOthersPass,
        "check_suspects_go_to_who_wants_them",
        "check_suspects_keep_their_place_and_their_bound",
    ),
    *store(holds.SuspectsForEver, "check_a_released_suspect_is_cleared"),
    *store(holds.DeadStayInTheWay, "check_the_used_up_die_once"),
    *store(holds.BuriesInSilence, "check_a_used_up_front_wakes"),
    *store(holds.RevivesTheDying, "check_death_at_the_last_delivery_is_death"),
    *store(holds.DiesWithoutAWord, "check_the_dead_have_an_error"),
    *inner(order.RedriveKeepsTheCount, "check_redriven_items_start_again"),
    *inner(order.RedriveTakesTheOldPlace, "check_redriven_items_start_again"),
    *inner(order.RedriveCountsAsAPut, "check_redriven_items_start_again", "check_stats_add_up"),
    *inner(
        order.KeyOrderByItemLock, "check_a_key_has_one_holder", "check_keys_stay_in_order_in_a_race"
    ),
    *inner(order.FifoByItemLock, "check_fifo_is_one_order"),
    *inner(order.FifoRunsByKey, "check_fifo_is_one_order"),
    *inner(order.HoldersStopAtOne, "check_the_same_holder_may_go_on"),
    *inner(order.KeysAreForAnybody, "check_a_key_has_one_holder"),
    *inner(order.GivesBackAtTheEnd, "check_a_released_run_is_in_order_again"),
    *inner(order.DeadFrontsBlock, "check_a_dead_front_lets_the_next_through"),
    *inner(order.DelayedFrontsArePassed, "check_a_delayed_front_holds_up_its_key"),
    *inner(order.DelaysBehindAreForgotten, "check_a_delay_behind_is_kept"),
    *inner(
        order.ShowsDelayedEarly, "check_delayed_items_show_on_time", "check_release_after_a_delay"
    ),
    *inner(order.NeverShowsTheDelayed, "check_delayed_items_show_on_time"),
    *inner(order.PriorityAboveKeys, "check_priority_yields_to_the_key"),
    *inner(order.NewestFirst, "check_older_items_come_first"),
    *inner(order.IgnoresPriority, "check_higher_priorities_come_first"),
    *inner(order.KeysIgnoreCase, "check_keys_are_exact"),
    *inner(order.DedupeForgets, "check_duplicates_are_left_out"),
    *inner(order.DedupeLooksAtTheStart, "check_duplicates_are_left_out"),
    *inner(order.DedupesForEver, "check_the_dedupe_window_ends"),
    *inner(order.IdsStartAgain, "check_ids_rise"),
    *inner(order.LosesErrors, "check_release_gives_back_at_once"),
    *inner(order.IgnoresReleaseDelays, "check_release_after_a_delay"),
    *inner(order.SharesTheCallersBuffer, "check_bodies_are_the_stores_own"),
    *store(waits.DropsTheHeld, "check_drop_spares_the_held"),
    *store(waits.PurgesTheHeld, "check_purge_takes_what_it_is_told"),
    *store(waits.RedrivesTheLiving, "check_redrive_takes_the_dead_alone"),
    *store(waits.DeletesTheNameOnly, "check_a_queue_made_again_starts_clean"),
    *store(waits.CountsTheDeadAsDepth, "check_stats_add_up"),
    *store(waits.ForgetsWhatWasDone, "check_done_is_done", "check_stats_add_up"),
    *store(waits.PagesOverlap, "check_peek_pages"),
    *store(waits.PeekHidesTheHolder, "check_peek_tells_all"),
    *store(waits.TakesFifoPriorities, "check_fifo_refuses_priority_and_delay"),
    *store(
        waits.MakesEveryQueueFifo,
        "check_the_first_put_makes_the_queue",
        "check_a_queue_is_made_once",
    ),
    *store(waits.CreatesOverTheOld, "check_a_queue_is_made_once"),
    *store(
        waits.TakesMakeQueues,
        "check_the_first_put_makes_the_queue",
        "check_an_unknown_queue_is_empty",
    ),
    *store(waits.PutsInSilence, "check_a_put_wakes_a_sleeper", "check_every_kind_of_change_wakes"),
    *store(waits.ReleasesInSilence, "check_every_kind_of_change_wakes"),
    *store(waits.RedrivesInSilence, "check_every_kind_of_change_wakes"),
    *store(waits.DropsInSilence, "check_every_kind_of_change_wakes"),
    *store(waits.WatchesOneQueue, "check_every_queue_is_watched"),
    *store(waits.NothingIsEverDue, "check_due_is_when_a_delay_ends", "check_reap_frees"),
    *store(waits.DueIsForTheDelayedOnly, "check_due_is_when_a_hold_ends"),
    *store(waits.DueIsForTheHeldOnly, "check_due_is_when_a_delay_ends"),
    *store(waits.DueForgetsTheHoldersKeys, "check_due_knows_what_is_behind_a_held_front"),
    *store(
        waits.DueIsAlwaysSoon, "check_due_is_when_a_delay_ends", "check_due_is_when_a_hold_ends"
    ),
    *store(waits.PutsBehindInSilence, "check_a_put_behind_a_held_item_wakes"),
    *store(waits.DueIsTheLast, "check_due_is_when_a_delay_ends"),
    *store(waits.TakesOutsideTheLock, "check_no_item_is_in_two_hands"),
    *store(waits.DedupesOutsideTheLock, "check_one_of_many_puts_a_duplicate"),
    *store(waits.TellsIdsByQueue, "check_a_change_spans_queues"),
    *store(waits.TellsDuplicatesIds, "check_duplicates_are_left_out"),
]


_RUNS = 5


def lab_of(broken: type[MemoryQueues]) -> MemoryLab:
    class BrokenStores(MemoryStores):
        def __init__(self, clock: VirtualClock) -> None:
            super().__init__(clock=clock)
            self.queues = broken(self.lock, self.coord, clock)

    return MemoryLab(BrokenStores, patience=0.5)


def name_of(parameter: type[MemoryQueues] | str) -> str:
    return parameter if isinstance(parameter, str) else parameter.__name__


@pytest.mark.parametrize(("broken", "check"), BROKEN, ids=name_of)
def test_is_caught(broken: type[MemoryQueues], check: str) -> None:
    rules = [rule for rule in queue_checks() if rule.__name__ == check]
    # Some are races, which a busy machine may not lose at once.
    runs = (run_suite(rules, lambda: lab_of(broken)) for _ in range(_RUNS))
    failures = next(filter(None, runs), [])
    assert [failure.check for failure in failures] == [check]
