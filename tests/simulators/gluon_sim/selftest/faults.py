"""The deliberate faults of the kernels, by name: values of their FAULT."""

GEMM = {
    "none": 0,
    "consumer_no_wait": 1,
    "producer_no_empty_wait": 2,
    "wrong_phase": 3,
    "release_before_wgmma_done": 4,
    "no_store_fence": 5,
    "expect_too_few_bytes": 6,
    "no_release": 7,
    "no_store_wait": 8,
    "double_release": 9,
    "expect_too_many_bytes": 10,
}

PAIR = {
    "none": 0,
    "products_wait_for_one_p": 1,
    "load_no_wait_empty": 2,
    "expect_bytes_of_both": 3,
    "products_no_wait_p": 4,
    "no_commit_kv": 5,
    "products_wait_for_one_half": 6,
}
EXCHANGE = {
    "none": 0,
    "no_sync": 1,
    "no_arrive": 2,
    "arrive_before_store": 3,
    "no_fence": 4,
    "clear_first": 5,
    "one_id": 6,
    "add_plainly": 7,
}
EXCHANGE_TMA = {"no_store_wait": 8, "no_stage_fence": 9}  # of the variant that adds by TMA
SUM = {
    "none": 0,
    "ready_relaxed": 1,
    "ready_polled_relaxed": 2,
    "ready_no_barrier": 3,
    "no_go": 4,
    "no_poll_ready": 5,
    "done_relaxed": 6,
    "done_polled_relaxed": 7,
    "done_no_barrier": 8,
    "no_poll_done": 9,
    "done_early": 10,
    "ready_in_cta": 11,
    "done_one_fewer": 12,
    "wait_for_one_more": 13,
    "ready_one_fewer": 14,
}
CANCEL = {"none": 0, "expect_too_few_bytes": 1, "no_wait": 2, "no_fence": 3, "id_of_a_refusal": 4, "ask_again": 5}

ATTENTION = {
    "none": 0,
    "softmax_no_wait_s": 1,
    "mma_no_wait_p": 2,
    "p_aliases_live_s": 3,
    "final_no_wait_o": 4,
    "load_no_wait_empty": 5,
    "no_commit_o": 6,
    "wrong_phase_p": 7,
    "no_o_fence": 8,
    "alpha_published_early": 9,
    "no_commit_kv": 10,
    "first_mma_accumulates": 11,
}
