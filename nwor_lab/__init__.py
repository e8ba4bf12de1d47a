# SPDX-License-Identifier: Apache-2.0
"""The laboratory around `nwor`: what the notebooks, the command line and the tests call.

reference   the four policies and a decoder in plain PyTorch; imports torch alone
pair        the shipped target and its EAGLE head
operators   the operators beside plain Python
audit       which bytes of a cache a step changed; imports nothing of what it audits
faults      ways to go wrong, to be injected on purpose
engines     vLLM's engines in processes of their own
bench       what is run on them: modes beside vanilla, parity, acceptance, steps
serving     vLLM's servers under load
soak        random traffic under the audit
gpu         kernels timed by themselves, and tuned
cost        bytes, launches and time, predicted
figures     what is drawn; it asserts nothing
run         the command line, results, claims and the pages of a run
"""
