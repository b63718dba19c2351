"The benchmark as files: every invariant broken by hand, ids and hashes made anew, is refused by the check that guards it, with its place; both sides stay apart."
import functools, hashlib, json, os, re, shutil
from dataclasses import replace
from pathlib import Path
import pytest
import yaml
from cmtrag import dataset
from cmtrag.dataset import SCHEMA, DatasetError, audit_dialogues, export, load_mumuqa, read_parquet, shared_evidence
from cmtrag.mumuqa import assemble, build, join_sources, rule_realizer
from cmtrag.sources import Corpus, SourceError, make_paragraph, read_source
from cmtrag.traces import resolve_refs
from cmtrag.world import world_source

SIZES = {'short train': 12, 'short dev': 8, 'long train': 4, 'long dev': 4}

@pytest.fixture(scope='module')
def sources(): return world_source('train', size='tiny'), world_source('dev', size='tiny')

@pytest.fixture(scope='module')
def mq(sources): return build(*sources, sizes=SIZES)

@pytest.fixture(scope='module')
def exported(mq, tmp_path_factory): return export(mq, tmp_path_factory.mktemp('data')/'mq', parquet=False)

@pytest.fixture
def folder(exported, tmp_path): return Path(shutil.copytree(exported, tmp_path/'mq'))

# --- files

def test_export_and_load(mq, folder):
    back = load_mumuqa(folder)
    assert (back.dialogues, back.counts, back.about)==(mq.dialogues, mq.counts, json.loads(json.dumps(mq.about)))
    assert back.corpus==mq.corpus

def files(folder): return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob('*')) if p.is_file()}

def test_the_same_bytes_twice(folder, sources, tmp_path, monkeypatch):
    "Two processes, another machine: all that is promised stays the same, and only `environment.json` is not promised."
    monkeypatch.setattr(dataset, 'versions', lambda: dict(platform='another machine', commit='another commit'))
    a,b = files(folder),files(export(build(*sources, sizes=SIZES, workers=2), tmp_path/'again', parquet=False))
    assert set(a)==set(b) and [n for n in a if a[n]!=b[n]]==['environment.json']
    assert b'another machine' in b['environment.json'] and not any(b'another' in v for n,v in b.items() if n!='environment.json')

def test_a_partial_realizer_leaves_no_address(sources, tmp_path):
    made = [export(build(*sources, sizes=SIZES, single=False, realizer=functools.partial(rule_realizer)), tmp_path/x, parquet=False) for x in 'ab']
    assert not re.search(r'0x[0-9a-f]{6}', (made[0]/'manifest.json').read_text(encoding='utf-8'))
    assert (made[0]/'manifest.json').read_bytes()==(made[1]/'manifest.json').read_bytes()

def test_fewer_splits_leave_nothing_behind(mq, folder):
    export(replace(mq, dialogues=mq.short), folder, parquet=False)
    assert load_mumuqa(folder).dialogues==mq.short and not (folder/'jsonl'/'long-dev.jsonl').exists()

def test_only_known_splits_are_written(mq, tmp_path):
    with pytest.raises(DatasetError, match="unknown split '../x dev'"): export(replace(mq, dialogues=[replace(mq.short[0], kind='../x', split='dev')]), tmp_path/'new', parquet=False)
    assert not (tmp_path/'new').exists()

def test_the_environment_may_change(folder):
    (folder/'environment.json').unlink()
    load_mumuqa(folder)

# --- the card

def test_a_hostile_licence_stays_text(mq, tmp_path):
    bad = 'CC\n---\nconfigs: []\n\x1b[1m# Free\n<img src=x onerror=alert(1)> | \u2028 ```'
    out = export(replace(mq, dialogues=[replace(d, licence=bad) for d in mq.dialogues], about={**mq.about, 'licence': bad}), tmp_path/'x', parquet=False)
    load_mumuqa(out)
    card = (out/'README.md').read_text(encoding='utf-8')
    head = yaml.safe_load(card.split('\n---\n')[0].strip('-\n'))
    assert re.fullmatch(r'[a-z0-9.\-]+', head['license_name']) and len(head['configs'])==4
    assert '\x1b' not in card and '\u2028' not in card and '\n# Free' not in card
    assert '<img' not in card.split('## Licence')[1]

def test_the_card_says_what_it_is_for(folder):
    card = (folder/'README.md').read_text(encoding='utf-8')
    heads = re.findall(r'^## (.+)$', card, re.M)
    assert heads[0]=='What it may be used for' and {'Statistics','Fields','Audit','Licence','Known weaknesses'} <= set(heads)

# --- one dialogue, broken

def cid(turns): return 'd'+hashlib.sha256(json.dumps(turns, sort_keys=True).encode()).hexdigest()[:12]
def read(folder, name): return [json.loads(l) for l in (folder/'jsonl'/f'{name}.jsonl').read_text(encoding='utf-8').splitlines()]
def write(folder, name, rows): (folder/'jsonl'/f'{name}.jsonl').write_text(''.join(json.dumps(r, ensure_ascii=False)+'\n' for r in rows), encoding='utf-8', newline='\n')
def manifest(folder): return json.loads((folder/'manifest.json').read_text(encoding='utf-8'))

def seal(folder, ids=True, **changes):
    "What somebody does who wants a changed data set to be believed: ids, sessions, counts, card and hashes are made anew."
    new,m = {},manifest(folder)
    names = [s.replace(' ','-') for s in m['dialogues'] if (folder/'jsonl'/f'{s.replace(" ","-")}.jsonl').exists()]
    for name in sorted(names, key=lambda n: not n.startswith('short')) if ids else ():
        rows = read(folder, name)
        for r in rows:
            for u in r['turns']: u['session'] = new.get((name[-3:], u['session']), u['session'])
            old,r['id'] = r['id'],cid(r['turns'])
            if name.startswith('short'): new[name[-3:], old] = r['id']
        write(folder, name, rows)
    for s in m['dialogues']:
        rows = read(folder, s.replace(' ','-'))
        m['dialogues'][s],m['turns'][s] = len(rows),sum(len(r['turns']) for r in rows)
    m |= changes
    card = (folder/'README.md').read_text(encoding='utf-8')
    top,head,rest = card.partition('dataset_info:')
    for s,n in m['dialogues'].items():
        kind,split = s.split()
        head_at = rest.index(f'- config_name: {kind}\n')
        rest = rest[:head_at]+re.sub(rf'(  - name: {split}\n    num_bytes: \d+\n    num_examples: )\d+', rf'\g<1>{n}', rest[head_at:], count=1)
    (folder/'README.md').write_text(top+head+rest, encoding='utf-8', newline='\n')
    m['files'] = {n: hashlib.sha256((folder/n).read_bytes()).hexdigest() if (folder/n).is_file() else '' for n in m['files']}
    m['identity'] = hashlib.sha256(json.dumps({k: v for k,v in m.items() if k!='identity'}).encode()).hexdigest()
    (folder/'manifest.json').write_text(json.dumps(m, ensure_ascii=False, indent=1)+'\n', encoding='utf-8', newline='\n')

def test_sealing_changes_nothing(folder):
    "The control: an untouched data set stays as it is, so what is refused below is refused for the break."
    old = files(folder)
    seal(folder)
    assert files(folder)==old

def traces(r): return [t for u in r['turns'] for t in u['traces']]
def cross(t): return any(e['cross_turn'] for e in t['edges'])
def inner(t): return any(not e['cross_turn'] for e in t['edges'])
def first(r, ok): return next((u, t) for u in r['turns'] for t in u['traces'] if ok(t))
def renumber(t, old, new):
    "Send the link to trace `old` to `new` instead, in every field that says so."
    d = t['draft']
    for k in ('sub_question','keywords'): d[k] = d[k].replace(f'[A_{old}]', f'[A_{new}]')
    d['deps'] = [new if i==old else i for i in d['deps']]
    for e in t['edges']: e['dep'] = new if e['dep']==old else e['dep']
def resolve(r):
    answers = {t['id']: t['answer'] for t in traces(r)}
    for t in traces(r): t['keywords_resolved'] = resolve_refs(t['draft']['keywords'], answers)
def end(u): return next(t for t in u['traces'] if t['id']==u['answer_trace'])

def skip_id(r): r['turns'][-1]['traces'][-1]['id'] += 1
def turn_number(r): r['turns'][1]['turn'] = 1
def trace_turn(r): r['turns'][1]['traces'][0]['turn'] = 1
def no_turns(r): r['turns'] = []
def forward_dep(r):
    t = first(r, lambda t: cross(t) or inner(t))[1]
    renumber(t, t['draft']['deps'][0], t['id'])
def lost_dep(r):
    t = first(r, lambda t: t['edges'])[1]
    t['draft']['deps'],t['edges'] = [],[]
def lost_edge(r): first(r, lambda t: t['edges'])[1]['edges'] = []
def own_label(r):
    e = next(e for e in first(r, cross)[1]['edges'] if e['cross_turn'])
    e['cross_turn'],e['phrase'] = False,''
def unknown_kind(r): first(r, cross)[1]['edges'][0]['type'] = 'Rel'
def edge_kind(r):
    for t in traces(r):
        for e in t['edges']: e['type'] = 'Ref' if e['type']=='Ext' else 'Ext'
def unsaid(r): first(r, cross)[1]['edges'][0]['phrase'] = 'that submarine'
def no_phrase(r): first(r, cross)[1]['edges'][0]['phrase'] = ''
def query(r): first(r, cross)[0]['query'] = 'Who knows?'
def inner_phrase(r): next(e for t in traces(r) for e in t['edges'] if not e['cross_turn'])['phrase'] = 'that'
def evidence(r): traces(r)[0]['para_ids'] = ['p0000000000000000']
def no_evidence(r): traces(r)[0]['para_ids'] = []
def answer(r): r['turns'][0]['answer'] += 'x'
def answer_trace(r): r['turns'][0]['answer_trace'] = 99
def blank_answer(r): traces(r)[0]['answer'] = ' '
def blank_query(r): r['turns'][0]['query'] = ' '
def keywords(r): first(r, cross)[1]['keywords_resolved'] = 'something else'
def wrong_side(r): r['split'] = 'train'
def wrong_kind(r): r['kind'] = 'ultra'
def licence(r): r['licence'] = 'anything goes'
def operator(r): r['turns'][0]['operator'] = 'XX'
def case(r): r['turns'][0]['case'] = 'odd'
def no_source(r): traces(r)[0]['source'] = ''
def no_hop(r): traces(r)[0]['hop'] = 0
def twice(r):
    a,b = r['turns'][0]['traces'][0],r['turns'][1]['traces'][0]
    b.update(source=a['source'], hop=a['hop'])
def unknown_field(r): r['extra'] = 1
def missing_field(r): del r['turns'][0]['query']
def wrong_type(r): r['turns'][0]['turn'] = '1'

OWN = [(skip_id, r'trace \d+ should be'), (turn_number, 'is numbered 1'), (trace_turn, 'says turn 1, stands in turn 2'), (no_turns, 'no turns'), (forward_dep, 'allowed are ids'),
       (lost_dep, 'a reference is missing from deps'), (lost_edge, 'do not match deps'), (own_label, 'cross_turn=False'), (unknown_kind, "edge type 'Rel'"), (edge_kind, r'is of type (Ext|Ref), says'),
       (unsaid, 'lacks the phrase'), (no_phrase, 'lacks the phrase'), (query, 'lacks the phrase'), (inner_phrase, 'inside the turn and has a phrase'), (evidence, 'is not in the corpus'),
       (no_evidence, 'no supporting paragraph'), (answer, 'is not that of trace'), (answer_trace, 'is not that of trace 99'), (blank_answer, 'empty answer'), (blank_query, 'empty query'),
       (keywords, 'keywords_resolved .* should be'), (wrong_side, 'the file is (short|long) dev'), (wrong_kind, 'the file is (short|long) dev'), (licence, "licence 'anything goes'"), (operator, "operator 'XX'"),
       (case, "case 'odd'"), (no_source, 'has no source'), (no_hop, 'has no source'), (twice, 'hop .* occurs twice'), (unknown_field, "unknown field 'extra'"), (missing_field, "missing field 'query'"),
       (wrong_type, 'expected int')]

def damage(folder, name, change, at=1, ids=True):
    rows = read(folder, name)
    change(rows[at])
    write(folder, name, rows)
    seal(folder, ids)

def refused(folder, says, name='', line=None, error=SourceError):
    with pytest.raises(error, match=says) as e: load_mumuqa(folder)
    if name: assert e.value.file==str(folder/'jsonl'/f'{name}.jsonl')
    if line: assert e.value.line==line

@pytest.mark.parametrize('change,says', OWN, ids=[f.__name__ for f,_ in OWN])
@pytest.mark.parametrize('name', ['short-dev', 'long-dev'])
def test_a_dialogue_broken_in_itself(folder, name, change, says):
    rows = read(folder, name)
    at = next(i for i,r in enumerate(rows) if any(map(cross, traces(r))) and any(map(inner, traces(r))))
    damage(folder, name, change, at, ids=change not in (missing_field,))
    refused(folder, says, name, at+1)

@pytest.mark.parametrize('name', ['short-dev', 'long-dev'])
def test_an_id_is_that_of_the_content(folder, name):
    def change(r): r['id'] = 'd000000000000'
    damage(folder, name, change, ids=False)
    refused(folder, 'is not the id of this content', name, 2)

# --- the case of a turn

def find(rows, ok): return next((i, k) for i,r in enumerate(rows) for k,u in enumerate(r['turns']) if ok(u, r))
def passing(u): return [t for t in u['traces'] if t['id'] > u['answer_trace']]
def linked(u): return any(map(cross, u['traces']))

def relabel(u, r, **kw): u.update(kw)
def uncarried(u, r): u['case'] = 'unchanged'
def several(u, r): u['traces'][0]['source'] = 'another'
def own_aside(u, r): passing(u)[0].update(source=end(u)['source'], hop=99)
def aliases(u, r): u['aliases'] = [*u['aliases'], 'Another Name']
def idle(u, r):
    mine = passing(u)[0]
    for t in traces(r):
        if mine['id'] in t['draft']['deps']: t['source'] = 'another'
def mixed(u, r): r['turns'][0].update(operator='SQR' if u['operator']=='GS' else 'GS')

STRUCTURE = [
    ('original as follow-up', lambda u, r: u['case']=='original', lambda u, r: relabel(u, r, case='follow-up'), 'says GS follow-up, but it refers to nothing'),
    ('follow-up as original', lambda u, r: u['case']=='follow-up', lambda u, r: relabel(u, r, case='original'), 'says GS original, but it refers back'),
    ('follow-up as relocated', lambda u, r: u['case']=='follow-up', lambda u, r: relabel(u, r, case='relocated'), 'says GS relocated, but it refers back'),
    ('relocated as follow-up', lambda u, r: u['case']=='relocated', lambda u, r: relabel(u, r, case='follow-up'), 'says SQR follow-up, but it refers back'),
    ('carrier as unchanged', lambda u, r: u['case']=='carrier', uncarried, 'says SQR unchanged, but it asks something in passing'),
    ('unchanged as original', lambda u, r: u['case']=='unchanged', lambda u, r: relabel(u, r, case='original'), 'says SQR original, but it refers to nothing'),
    ('GS and carrier', lambda u, r: u['case']=='carrier', lambda u, r: [relabel(v, r, operator='GS') for v in r['turns']], 'but it'),
    ('two operators', lambda u, r: True, mixed, 'mixes the operators GS, SQR'),
    ('several questions in a turn', lambda u, r: u['case'] in ('original','follow-up') and len(u['traces']) > 1, several, 'asks hops of several questions'),
    ('in passing, of its own question', lambda u, r: passing(u), own_aside, 'is not one first step of another question'),
    ('in passing, for nobody', lambda u, r: passing(u) and not linked(u), idle, 'refers to trace .* of another question|no later turn needs trace'),
    ('relocated from another question', lambda u, r: u['case']=='relocated' and len(u['traces'])==1, lambda u, r: u['traces'][0].update(source='another'), 'refers to trace .* of another question'),
    ('aliases of the turn', lambda u, r: True, aliases, 'its aliases are not those of trace')]

@pytest.mark.parametrize('ok,change,says', [x[1:] for x in STRUCTURE], ids=[x[0] for x in STRUCTURE])
def test_the_case_of_a_turn_follows_from_its_structure(folder, ok, change, says):
    for name in ('short-train','short-dev'):
        rows = read(folder, name)
        if any(ok(u, r) for r in rows for u in r['turns']): break
    i,k = find(rows, ok)
    damage(folder, name, lambda r: change(r['turns'][k], r), i)
    refused(folder, says, name, i+1)

def test_what_nobody_needs_is_not_asked_in_passing(folder):
    "The later turn asks for the answer itself instead, so the link is gone."
    rows = read(folder, 'short-train')
    def drop(r):
        u = next(u for u in r['turns'] if passing(u))
        mine = passing(u)[0]
        for v in r['turns']:
            for t in v['traces']:
                if mine['id'] not in t['draft']['deps']: continue
                for k in ('sub_question','keywords'): t['draft'][k] = t['draft'][k].replace(f'[A_{mine["id"]}]', mine['answer'])
                t['draft']['deps'],t['edges'] = [i for i in t['draft']['deps'] if i!=mine['id']],[e for e in t['edges'] if e['dep']!=mine['id']]
                for e in t['edges']: e['type'] = dataset.edge_type(t['draft']['sub_question'])
                if v['case']=='relocated' and not linked(v): v['case'] = 'unchanged'
        resolve(r)
    at = one(rows, lambda r: any(map(passing, r['turns'])))
    damage(folder, 'short-train', drop, at)
    refused(folder, 'no later turn needs trace', 'short-train', at+1)

# --- dialogues against each other

def one(rows, ok): return next(i for i,r in enumerate(rows) if ok(r))

def hop_answer(r):
    "Another answer, in all that follows from it."
    u = r['turns'][-1]
    for o in (u, end(u)): o['answer'] = 'Zanzibar Quux'
    resolve(r)
def hop_evidence(r): traces(r)[0]['para_ids'] = traces(r)[-1]['para_ids']
def hop_aliases(r):
    u = r['turns'][-1]
    for o in (u, end(u)): o['aliases'] = ['Zanzibar Quux']
def hop_question(r):
    d = next(t for t in traces(r) if not t['draft']['deps'])['draft']
    d['sub_question'] = 'What is the boiling point of lead?'
def hop_keywords(r):
    t = next(t for t in traces(r) if not t['draft']['deps'])
    t['draft']['keywords'] = t['keywords_resolved'] = 'boiling lead'

ACROSS = [(hop_answer, 'the answer of hop'), (hop_evidence, 'the evidence of hop'), (hop_aliases, 'the aliases of hop'), (hop_question, 'the sub-question of hop'), (hop_keywords, 'the keywords of hop')]

@pytest.mark.parametrize('change,says', ACROSS, ids=[f.__name__ for f,_ in ACROSS])
def test_a_hop_is_the_same_wherever_it_occurs(folder, change, says):
    def both(r):
        change(r)
        for t in traces(r):   # link types follow from the sub-question; they're not what is broken here
            for e in t['edges']: e['type'] = dataset.edge_type(t['draft']['sub_question'])
    damage(folder, 'short-dev', both)
    refused(folder, f'{says} .* here and .* elsewhere', 'short-dev', 2)

def misdirect(r):
    for n,u in enumerate(r['turns']):
        for t in u['traces']:
            for e in t['edges']:
                a = next(x['answer'] for x in traces(r) if x['id']==e['dep'])
                new = next((x['id'] for v in r['turns'][:n] for x in v['traces'] if x['id'] not in t['draft']['deps'] and x['answer']!=a and (u['operator']=='GS' or x['source']==t['source'])), None)
                if e['cross_turn'] and new:
                    renumber(t, e['dep'], new)
                    return resolve(r)
    return False

def test_a_link_to_a_wrong_trace_of_a_short_dialogue(folder):
    rows = read(folder, 'short-dev')
    at = one(rows, lambda r: misdirect(json.loads(json.dumps(r))) is None)
    damage(folder, 'short-dev', misdirect, at)
    refused(folder, 'the sub-question of hop .* here and .* elsewhere', 'short-dev', at+1)

def other_case(r): r['turns'][1]['case'] = 'partial'
def other_operator(r): r['turns'][1]['operator'] = 'SQR' if r['turns'][1]['operator']=='GS' else 'GS'
def other_aliases(r): traces(r)[0]['aliases'] = ['x']
def other_question(r):
    d = next(t for t in traces(r) if not t['draft']['deps'])['draft']
    d['sub_question'] = 'What is the boiling point of lead?'
def other_query(r): r['turns'][0]['query'] += ' Really?'
def swapped(r):
    "Two turns of different sessions change their sessions' names."
    a = r['turns'][0]['session']
    b = next(u['session'] for u in r['turns'] if u['session']!=a)
    for u in r['turns']: u['session'] = {a: b, b: a}.get(u['session'], u['session'])

LONG = [(misdirect, r'turns\[\d+\].traces\[\d+\].draft'), (other_case, r'turns\[1\].case is .partial.'), (other_operator, r'turns\[1\].operator'), (other_aliases, r'turns\[0\].traces\[0\].aliases'),
        (other_question, r'traces\[\d+\].draft.sub_question'), (other_query, r'turns\[0\].query')]

@pytest.mark.parametrize('change,says', LONG, ids=[f.__name__ for f,_ in LONG])
def test_a_long_dialogue_is_what_its_sessions_make(folder, change, says):
    damage(folder, 'long-dev', change)
    refused(folder, f'{says}.* in the short dialogue', 'long-dev', 2)

def test_sessions_keep_their_names(folder):
    damage(folder, 'long-dev', swapped)
    refused(folder, 'in the short dialogue|is not whole', 'long-dev', 2)

def test_a_session_is_whole(folder):
    rows = read(folder, 'long-dev')
    u = rows[0]['turns'].pop()   # nothing can depend on the last turn
    write(folder, 'long-dev', rows)
    seal(folder)
    refused(folder, rf'session {u["session"]} is not whole', 'long-dev', 1)

def test_a_session_exists(folder):
    def change(r):
        for u in r['turns']: u['session'] = 'd000000000000'
    damage(folder, 'long-dev', change)
    refused(folder, "session 'd000000000000' is none of the short dialogues", 'long-dev', 2)

def test_a_long_dialogue_has_several_sessions(folder):
    short = read(folder, 'short-dev')[0]
    rows = read(folder, 'long-dev')
    rows[1]['turns'] = [{**u, 'session': short['id']} for u in short['turns']]
    write(folder, 'long-dev', rows)
    seal(folder)
    refused(folder, 'is one session', 'long-dev', 2)

def test_a_session_is_of_its_side(folder):
    rows = read(folder, 'long-dev')
    moved,*rest = read(folder, 'long-train')
    rows[1]['turns'] = moved['turns']
    write(folder, 'long-train', rest)
    write(folder, 'long-dev', rows)
    seal(folder)
    refused(folder, 'is of the other side', 'long-dev', 2)

def test_a_whole_turn_is_not_a_partial_one(folder):
    name,at,k = next((n, i, k) for n in ('short-train','short-dev') for i,r in enumerate(read(folder, n)) for k,u in enumerate(r['turns']) if u['case']=='original')
    damage(folder, name, lambda r: r['turns'][k].update(case='partial'), at)
    refused(folder, 'says partial, but hop .* is the end of', name, at+1)

def test_a_partial_turn_is_not_a_whole_one(mq, tmp_path):
    "Where the benchmark has a partial turn, calling it whole contradicts its question."
    src = world_source('dev')
    full = assemble(src, 'dev', n_short=40, n_long=0, single=True)
    out = export(full, tmp_path/'one', parquet=False)
    load_mumuqa(out)
    rows = read(out, 'short-dev')
    i,k = find(rows, lambda u, r: u['case']=='partial')
    damage(out, 'short-dev', lambda r: r['turns'][k].update(case='original'), i)
    refused(out, 'ends in hop .* here and in hop .* elsewhere', 'short-dev', i+1)

def test_a_question_that_says_its_answer(folder):
    for name in ('single-dev','short-dev'):
        def change(r):
            u = r['turns'][0]
            u['query'] = f'{u["query"][:-1]} {u["answer"]}?'
        work = Path(shutil.copytree(folder, folder.parent/name))
        damage(work, name, change)
        refused(work, 'gives an answer away', name, 2)

def test_a_source_stays_on_its_side(folder):
    rows = read(folder, 'short-dev')
    rows.append({**read(folder, 'short-train')[0], 'split': 'dev'})
    rows[-1]['turns'][0]['query'] = 'So: '+rows[-1]['turns'][0]['query']   # another dialogue, so no id occurs twice
    write(folder, 'short-dev', rows)
    seal(folder)
    refused(folder, 'is on both sides', 'short-dev', len(rows))

@pytest.mark.parametrize('name', ['short-dev', 'long-dev', 'single-dev'])
def test_a_line_occurs_once(folder, name):
    rows = read(folder, name)
    write(folder, name, [*rows, rows[0]])
    seal(folder)
    refused(folder, 'occurs twice, first in', name, len(rows)+1)

def test_evidence_stays_on_its_side(folder):
    "A training dialogue under other source ids is found by its paragraphs."
    rows,new = read(folder, 'short-dev'),{**read(folder, 'short-train')[0], 'split': 'dev'}
    for t in traces(new): t['source'] = 'zz'+t['source']
    write(folder, 'short-dev', [*rows, new])
    seal(folder)
    refused(folder, r'\d+ paragraphs are on both sides, such as', error=DatasetError)

def retell(folder, f):
    "Change the text of all development files."
    for p in (folder/'jsonl').glob('*-dev.jsonl'): edit(p, f)

def test_titles_stay_on_their_side(folder):
    "A development paragraph gets the title of a training paragraph; its text stays, so its id is another one."
    at,paras = folder/'jsonl'/'corpus.jsonl',{p['id']: p for p in read(folder, 'corpus')}
    title,old = (paras[traces(read(folder, f'short-{x}')[0])[0]['para_ids'][0]] for x in ('train','dev'))
    new = make_paragraph(title['title'], old['text'])
    retell(folder, lambda s: s.replace(old['id'], new.id))
    edit(at, lambda s: s+json.dumps(vars(new))+'\n')
    corpus = Corpus.load(at)
    seal(folder, corpus=corpus.hash, paragraphs=len(corpus))
    refused(folder, r'1 titles are on both sides, such as', error=DatasetError)

def bridges(folder, name): return sorted({next(t['answer'] for t in traces(r) if t['id']==i) for r in read(folder, name) for t in traces(r) for i in t['draft']['deps']})

def test_bridges_stay_on_their_side(folder):
    "A development bridge gets the name of a training bridge wherever it is named."
    old,new = bridges(folder, 'short-dev')[0],bridges(folder, 'short-train')[0]
    retell(folder, lambda s: s.replace(json.dumps(old, ensure_ascii=False)[1:-1], json.dumps(new, ensure_ascii=False)[1:-1]))
    seal(folder)
    refused(folder, r'1 bridges are on both sides, such as', error=DatasetError)

def test_ranges_are_checked_when_asked(folder, tmp_path):
    load_mumuqa(folder, check_ranges=True)
    out = export(assemble(world_source('dev', size='tiny'), 'dev', n_short=6, n_long=0, turns={2: 1.}, relocated=0.), tmp_path/'two', parquet=False)
    assert load_mumuqa(out).dialogues
    with pytest.raises(SourceError, match='Turns 2, allowed 3 to'): load_mumuqa(out, check_ranges=True)

def edit(path, f): path.write_text(f(path.read_text(encoding='utf-8')), encoding='utf-8', newline='\n')

# --- the folder

@pytest.mark.parametrize('name,change,says', [
    ('jsonl/long-dev.jsonl', lambda s: s[s.index('\n')+1:], 'dialogues, the manifest says'),
    ('jsonl/corpus.jsonl', lambda s: s[:s.rindex('\n', 0, -1)+1], 'paragraphs, the manifest says'),
    ('jsonl/long-dev.jsonl', lambda s: s[:-40], 'not JSON'),
    ('jsonl/long-dev.jsonl', lambda s: s.replace('{"id"', '{ "id"', 1), 'long-dev.jsonl: .*SHA-256'),
    ('README.md', lambda s: s.replace('num_examples: ', 'num_examples: 1', 1), 'the card counts'),
    ('README.md', lambda s: s+'!', 'README.md: .*SHA-256'),
    ('manifest.json', lambda s: s.replace('"schema": ', '"schema": 9'), r'schema 9\d*, this version reads'),
    ('manifest.json', lambda s: s.replace(f'"schema": {SCHEMA}', '"schema": true'), 'schema is missing or of the wrong type'),
    ('manifest.json', lambda s: s[:-9], 'manifest.json: '),
    ('manifest.json', lambda s: '['*200000, 'manifest.json: .*recursion'),
    ('manifest.json', lambda s: s.replace('"short dev"', '"../x dev"'), 'unknown split'),
    ('manifest.json', lambda s: '[]', 'it is missing or of the wrong type')])
def test_a_damaged_file_is_refused(folder, name, change, says):
    edit(folder/name, change)
    with pytest.raises((SourceError, DatasetError), match=says): load_mumuqa(folder)

@pytest.mark.parametrize('name', ['manifest.json', 'README.md'])
def test_a_binary_file_is_named(folder, name):
    (folder/name).write_bytes(b'\xff\xfe')
    with pytest.raises(DatasetError, match=f'{name}: .*decode'): load_mumuqa(folder)

def tamper(folder, f, hashes=False):
    m = manifest(folder)
    f(m)
    (folder/'manifest.json').write_text(json.dumps(m, ensure_ascii=False, indent=1)+'\n', encoding='utf-8', newline='\n')
    if hashes: seal(folder, **{k: v for k,v in m.items() if k not in ('files','identity')})

@pytest.mark.parametrize('change', [dict(name='x'), dict(about={'licence': 'CC BY 4.0', 'parameters': {'seed': 99}}), dict(counts={'a': 1}), dict(audit=[]), dict(extra=1)], ids=lambda c: next(iter(c)))
def test_what_only_the_manifest_says_is_part_of_the_identity(folder, change):
    if 'about' in change: change = dict(about={**manifest(folder)['about'], 'parameters': {'seed': 99}})
    tamper(folder, lambda m: m.update(change))
    with pytest.raises(DatasetError, match='is not the manifest that was exported'): load_mumuqa(folder)

MANIFEST = [
    ('another corpus', lambda m: m.update(corpus='0'*16), 'the manifest says 0{16}'),
    ('a paragraph more', lambda m: m.update(paragraphs=m['paragraphs']+1), 'paragraphs, the manifest says'),
    ('no files', lambda m: m.update(files={}), 'manifest.json: files lacks'),
    ('a file unlisted', lambda m: m['files'].pop('README.md'), "files lacks 'README.md'"),
    ('a file outside', lambda m: m['files'].update({'../../etc/hostname': 'x'}), "files has '../../etc/hostname'"),
    ('a NUL in a name', lambda m: m['files'].update({'nul\0x': 'x'}), r"files has 'nul\\x00x'"),
    ('half of Parquet', lambda m: m['files'].update({'parquet/corpus.parquet': 'x'}), "files lacks 'parquet/long-dev.parquet'"),
    ('no split', lambda m: m.update(dialogues={}), 'has no split'),
    ('a split left out', lambda m: (m['dialogues'].pop('long dev'), m['turns'].pop('long dev'), m['files'].pop('jsonl/long-dev.jsonl')), "long-dev.jsonl: the manifest doesn't know this file"),
    ('a count as text', lambda m: m['dialogues'].update({'short dev': '8'}), 'dialogues, the manifest says 8'),
    ('other turns', lambda m: m['turns'].update({'short dev': 1}), 'turns, the manifest says 1'),
    ('no identity', lambda m: m.pop('identity'), 'identity is missing')]

@pytest.mark.parametrize('change,says', [x[1:] for x in MANIFEST], ids=[x[0] for x in MANIFEST])
def test_the_manifest_says_what_is_there(folder, change, says):
    tamper(folder, change)
    with pytest.raises(DatasetError, match=says): load_mumuqa(folder)

@pytest.mark.parametrize('name', ['jsonl/short-test.jsonl', 'jsonl/notes.txt', 'parquet/short-dev.parquet'])
def test_an_unknown_file_is_refused(folder, name):
    (folder/name).parent.mkdir(exist_ok=True)
    (folder/name).write_text('junk')
    with pytest.raises(DatasetError, match="the manifest doesn't know this file"): load_mumuqa(folder)

@pytest.mark.parametrize('name', ['README.md', 'jsonl/corpus.jsonl', 'jsonl/short-dev.jsonl'])
def test_a_missing_file_is_named(folder, name):
    (folder/name).unlink()
    with pytest.raises(DatasetError, match=f'{name}: is missing'): load_mumuqa(folder)

def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(DatasetError, match='manifest.json: No such file'): load_mumuqa(tmp_path/'nowhere')

def test_parquet_reads_back(mq, tmp_path):
    pytest.importorskip('pyarrow')
    out = export(mq, tmp_path/'mq')
    for k,ds in mq.splits.items(): assert read_parquet(out/'parquet'/f'{k.replace(" ", "-")}.parquet')==ds
    load_mumuqa(out)
    (out/'parquet'/'short-dev.parquet').write_bytes(b'PAR1')
    with pytest.raises(DatasetError, match='short-dev.parquet: .*SHA-256'): load_mumuqa(out)

# --- sides

def test_sides_share_nothing(mq):
    for kind in ('short','long'):
        a,b = mq.splits[f'{kind} train'],mq.splits[f'{kind} dev']
        assert not any(shared_evidence(a, b, mq.corpus).values())
        assert not any(r['on both sides'] for r in audit_dialogues(a, b)[:5])

def test_the_audit_finds_what_is_shared(mq):
    ds = mq.splits['short dev']
    assert all(shared_evidence(ds, ds, mq.corpus).values()) and all(r['on both sides'] for r in audit_dialogues(ds, ds))
    assert shared_evidence(ds, ds[:1], mq.corpus)['paragraphs']==len({p for t in ds[0].traces for p in t.para_ids})

# --- real questions

DATA = os.environ.get('CMTRAG_DATA')
needs_data = pytest.mark.skipif(not DATA, reason='CMTRAG_DATA is not set')

@pytest.fixture(scope='module')
def real():
    src = join_sources([read_source(Path(DATA)/'musique'/f'musique_ans_{n}.jsonl') for n in ('dev_gold_only', 'dev_200')])
    return src,build(src, sizes={'short train': 3104, 'short dev': 362, 'long train': 300, 'long dev': 60, 'ultra test': 20})

@needs_data
def test_real_sides_share_no_title_and_no_bridge(real):
    _,mq = real
    a,b = ([d for k,ds in mq.splits.items() if ('train' in k)==t for d in ds] for t in (True, False))
    assert not any(shared_evidence(a, b, mq.corpus).values())

@needs_data
def test_real_export_loads(real, tmp_path):
    export(real[1], tmp_path/'real', parquet=False)
    assert load_mumuqa(tmp_path/'real').dialogues==real[1].dialogues
