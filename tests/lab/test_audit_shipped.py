# SPDX-License-Identifier: Apache-2.0
"""What a KV connector copies out of an audited cache is looked at, and what it brings back is taken as it is."""

import torch
from devices import each_device

from tests.lab.audited import GONE, KEPT, LAYERS, REJECTED, STEP, Audited, clean_step

EVERY = torch.arange(24)


@each_device
def test_what_is_shipped_is_looked_at(device):
    """A slot counts from the step that left a rejected row in it, or not all of a kept one, until a row is kept there;
    in its layer alone."""
    audited = Audited("HND", device)
    clean_step(audited)
    audited.audit.ship(EVERY)
    assert audited.audit.report.shipped_slots == 24 * LAYERS and audited.audit.report.clean
    audited.begin()
    for layer in range(LAYERS):
        audited.write(layer, which=slice(4) if layer == 1 else slice(2 if layer == 2 else 3))
    audited.audit.after(GONE)
    audited.audit.ship(torch.cat([KEPT, REJECTED]), layer=0)
    assert audited.audit.report.shipped_rejected == audited.audit.report.shipped_unwritten == 0
    for slots, found in ((KEPT, (0, 1)), (REJECTED, (1, 1))):
        audited.audit.ship(slots)
        assert (audited.audit.report.shipped_rejected, audited.audit.report.shipped_unwritten) == found
    for slots in (STEP, STEP.flip(0)):  # the second keeps the rows that were rejected
        clean_step(audited, slots)
    audited.audit.ship(EVERY)
    assert (audited.audit.report.shipped_rejected, audited.audit.report.shipped_unwritten) == (1, 1)


@each_device
def test_blocks_that_come_back_are_taken_as_they_are(device):
    """Between two steps, and what a connector brought is no rejected row; the other blocks are not."""
    audited = Audited("HND", device)
    audited.begin()
    for layer in range(LAYERS):
        audited.write(layer, which=slice(4))
    audited.audit.after(GONE)
    block = torch.arange(4) + REJECTED[0].item() // 4 * 4
    for layer in range(LAYERS):
        audited.flip(layer, block[1].item())
    audited.audit.accept(block)
    audited.audit.ship(block)
    audited.audit.look_between_steps()
    report = audited.audit.report
    assert (report.dirty_slots, report.shipped_rejected, report.stray_slots) == (LAYERS, 0, 0)
    audited.flip(0, (block[0].item() + 4) % 24)
    audited.audit.look_between_steps()
    assert report.stray_slots == 1


@each_device
def test_a_step_may_write_the_bytes_that_a_connector_brought(device):
    """Its slots are poisoned anew first, or its kept rows would look unwritten."""
    audited = Audited("HND", device)
    for layer in range(LAYERS):
        audited.write(layer)
    audited.audit.accept(torch.arange(12))  # the blocks of the kept rows
    clean_step(audited)
    assert audited.audit.report.clean, audited.audit.examples
