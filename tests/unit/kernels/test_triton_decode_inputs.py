"""The gathered inputs of a decoding step, against plain indexing."""

import torch

from tests.triton_device import DEVICE  # isort: skip

from penstock.kernels.triton.decode_inputs import gather_decode_inputs

BLOCK_TOKENS = 16


def test_every_row_gets_its_own_token_slot_and_draw() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 1000, (9, 100), generator=generator, dtype=torch.int32).to(DEVICE)
    tables = torch.randint(1, 50, (9, 7), generator=generator, dtype=torch.int32).to(DEVICE)
    temperatures, seeds = torch.rand(9, device=DEVICE), torch.arange(9, device=DEVICE) << 40
    rows = torch.randint(0, 9, (131,), generator=generator).to(DEVICE)
    positions = torch.randint(0, 99, (131,), generator=generator).to(DEVICE)
    found = gather_decode_inputs(rows, positions, tokens, tables, temperatures, seeds, BLOCK_TOKENS)
    assert torch.equal(found.token_ids, tokens[rows, positions])
    blocks = tables[rows, positions // BLOCK_TOKENS].long()
    assert torch.equal(found.slots, blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS)
    assert torch.equal(found.lens.long(), positions + 1)
    assert torch.equal(found.next_positions, positions + 1)
    tokens.view(-1)[found.places] = -1
    assert (tokens[rows, positions + 1] == -1).all()
    assert torch.equal(found.temperatures, temperatures[rows])
    assert torch.equal(found.seeds, seeds[rows])
