"10,000 generated plans, valid and malformed: valid ones round-trip, malformed ones end in a `TraceError` with a place."
import random

from cmtrag.traces import (STRUCTURAL_TOKENS, TraceDraft, TraceError, answer_refs, escape_control, parse_plan, resolve_refs,
                           serialise_plan, unescape_control)

WORDS = ['who', 'founded', 'CBS', 'the', 'river', '[A_2]x', '[[', ']]', '\\', '[\\KW]', '[KW]', '[/TRACE]', '[/PLAN]', '[T_3]', 'é', '日本', '\t', '"', "'", '[A_', '\x00', '|', '[\\\\DEP]', '\U0001f600', '[SubQ', 'A_1']

def text(r, k):
    "Words, control tokens and references to earlier traces, mixed; not blank, no outer blanks (they are not kept)."
    ws = [r.choice(WORDS) if r.random()<.8 or k==1 else f'[A_{r.randrange(1,k)}]' for _ in range(r.randrange(1,9))]
    s = ' '.join(ws).strip()
    bad = [i for i in answer_refs(s) if i>=k]
    for i in bad: s = s.replace(f'[A_{i}]', 'x')
    return s or 'q'

def plan(r):
    first = r.choice([1, 1, 7, 120])
    drafts = []
    for k in range(first, first+r.randrange(1,6)):
        q,kw = text(r, k),(text(r, k) if r.random()<.9 else '')
        deps = tuple(r.sample(range(1,k), min(k-1, r.randrange(3))))
        drafts.append(TraceDraft(q, kw, deps))
    return first,drafts

def mutate(r, s):
    "One edit that a model or a disk might make."
    i,j = sorted(r.randrange(len(s)+1) for _ in range(2))
    tok = r.choice(STRUCTURAL_TOKENS + ('[T_1]', '[T_999]', '[A_999]', '[T_x]', '', ' ', '\x00', '[PLAN'))
    return r.choice([lambda: s[:i], lambda: s[i:], lambda: s[:i]+s[j:], lambda: s[:i]+tok+s[i:], lambda: s[:i]+tok+s[j:],
                     lambda: s.replace(r.choice(STRUCTURAL_TOKENS), tok, 1), lambda: s+s])()

def test_plans():
    r,valid,malformed = random.Random(0),0,0
    for n in range(10_000):
        first,drafts = plan(r)
        ids = r.random()<.5
        s = serialise_plan(drafts, first, ids=ids)
        if n%2==0:
            assert parse_plan(s, first)==drafts
            valid += 1
            continue
        try: got = parse_plan(mutate(r, s), first)
        except TraceError as e:
            assert e.place, str(e)
            malformed += 1
        else: # the edit left a plan: then it is one, and says so again
            assert parse_plan(serialise_plan(got, first), first)==got
            valid += 1
    assert valid>5000 and malformed>3000, (valid, malformed)

def test_hostile_text_is_inert():
    r = random.Random(1)
    for _ in range(2000):
        s = ' '.join(r.choice(WORDS+list(STRUCTURAL_TOKENS)+['[A_1]', '[\\A_1]']) for _ in range(6))
        e = escape_control(s)
        assert unescape_control(e)==s
        assert not answer_refs(e) and not any(t in e for t in STRUCTURAL_TOKENS)

def test_resolution_is_one_pass():
    r = random.Random(2)
    for _ in range(2000):
        answers = {k: r.choice(['[A_1]', '[A_2]', '[\\A_1]', 'CBS', '\\1', '[T_1]']) for k in range(1, 15)}
        ks = [r.randrange(1,15) for _ in range(4)]
        assert resolve_refs(' '.join(f'[A_{k}]' for k in ks), answers)==' '.join(answers[k] for k in ks)
