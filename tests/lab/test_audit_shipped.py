# SPDX-License-Identifier: Apache-2.0
"""What a KV connector copies out of an audited cache is looked at, and what it brings back is taken as it is."""

import torch
from devices import each_device

from tests.lab.audited import GONE, KEPT, LAYERS, REJECTED, STEP, Audited, clean_step, memory


@memory
@each_device
def test_what_is_shipped_is_looked_at(kind, device):
    """A slot counts from the step that left a rejected row in it until a row is kept there, and in its layer alone."""
    audited = Audited(kind, device)
    clean_step(audited)
    audited.audit.ship(torch.arange(24))
    assert audited.audit.report.shipped_slots == 24 * LAYERS and audited.audit.report.clean
    audited.begin()
    for layer in range(LAYERS):
        audited.write(layer, which=slice(4 if layer == 1 else 3))  # layer 1 writes a rejected row
    audited.audit.after(GONE)
    audited.audit.ship(REJECTED)
    assert audited.audit.report.shipped_rejected == 1
    audited.audit.ship(KEPT)
    assert audited.audit.report.shipped_rejected == 1
    clean_step(audited, STEP.flip(0))  # keeps the rows that were rejected
    audited.audit.ship(torch.arange(24))
    assert audited.audit.report.shipped_rejected == 1


@memory
@each_device
def test_a_kept_row_that_is_shipped_before_it_is_written_is_counted(kind, device):
    """From the step that was to write it until it is written, in its layer alone."""
    audited = Audited(kind, device)
    audited.begin()
    for layer in range(LAYERS):
        audited.write(layer, which=slice(2 if layer == 1 else 3))  # layer 1 lacks a kept row
    audited.audit.after(GONE)
    audited.audit.ship(STEP[2:3], layer=0)
    assert audited.audit.report.shipped_slots == 1 and audited.audit.report.shipped_unwritten == 0
    audited.audit.ship(STEP[2:3])
    assert audited.audit.report.shipped_unwritten == 1
    clean_step(audited, STEP)
    audited.audit.ship(torch.arange(24))
    assert audited.audit.report.shipped_unwritten == 1


@memory
@each_device
def test_blocks_that_come_back_are_taken_as_they_are(kind, device):
    """Between two steps; the other blocks are not, and what a connector brought is no rejected row."""
    audited = Audited(kind, device)
    audited.begin()
    for layer in range(LAYERS):
        audited.write(layer, which=slice(4))
    audited.audit.after(GONE)
    left = audited.audit.report.dirty_slots
    block = torch.arange(4) + REJECTED[0].item() // 4 * 4
    for layer in range(LAYERS):
        audited.flip(layer, block[1].item())
    audited.audit.accept(block)
    audited.audit.ship(block)
    audited.audit.look_between_steps()
    assert (left, audited.audit.report.shipped_rejected, audited.audit.report.stray_slots) == (LAYERS, 0, 0)
    audited.flip(0, (block[0].item() + 4) % 24)
    audited.audit.look_between_steps()
    assert audited.audit.report.stray_slots == 1


@memory
@each_device
def test_a_step_may_write_the_bytes_that_a_connector_brought(kind, device):
    """Its slots are poisoned anew first, or its kept rows would look unwritten."""
    audited = Audited(kind, device)
    for layer in range(LAYERS):
        audited.write(layer)
    audited.audit.accept(torch.arange(12))  # the blocks of the kept rows
    clean_step(audited)
    assert audited.audit.report.clean, audited.audit.examples
