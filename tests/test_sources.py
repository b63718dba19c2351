"Readers of source files under generated rows: sound ones come back as written, damaged ones end in `SourceError` with a place."
import json, os, random, time
from pathlib import Path
import pytest
from cmtrag.sources import (Corpus, SHAPES, SourceError, make_paragraph, read_2wiki, read_gold_only, read_hotpotqa, read_musique,
                            read_paragraph_pool, read_rows, read_source)
from cmtrag.traces import resolve_refs

N = 500  # rows of each of the four schemas, sound and damaged alike: 2,000 of either kind
READ = dict(musique=read_musique, gold_only=read_gold_only, hotpotqa=read_hotpotqa, wiki=read_2wiki)
WORDS = ['Orm', 'the Quell', 'café', 'C# and #tag', '[A_1]', r'[\A_2]', '[KW]', '[/PLAN]', 'a\u2028b', 'tab\there', 'nul\x00', 'esc\x1b', 'n\x85el', 'עברית', '漢字', '🜂', '"quoted"',
         "d'Or", 'back\\slash', '\u200b', '{x}', 'line\nbreak', 'NaN', '1e999', '#1st', '% d', '</think>', ' spaced  out ', 'ﬁ', 'e\u0301']

def words(r, n=6): return ' '.join(r.choice(WORDS) for _ in range(r.randint(1, n)))

def hop_text(r, k, refs):
    "A hop in MuSiQue's notation, as a template: a tuple of text and reference numbers"
    if r.random() < .4:
        ref = refs[:1] or ['Orm']
        return (ref[0], ' >> ', words(r, 2), *(x for j in refs[1:] for x in (' and ', j)))
    return (words(r), *(x for j in r.sample(refs, len(refs)) for x in (r.choice([' ', ' (', '"', '#']), j, r.choice(["'s", ' ', ')', ', ', '?', '#']), words(r))))

def as_hash(t): return ''.join(f'#{x}' if isinstance(x, int) else x for x in t)
def answered(t, answers): return ''.join(answers[x] if isinstance(x, int) else x for x in t)

def paragraphs(r, n, tag): return [(f'{words(r, 2)} {tag}.{i}', words(r, 12)) for i in range(n)]

def musique(r, i, kind='musique'):
    shape = r.choice(list(SHAPES))
    refs,n = SHAPES[shape],len(SHAPES[shape])
    paras = paragraphs(r, n if kind == 'gold_only' else r.randint(n, 8), i)
    support,templates = r.sample(range(len(paras)), n),[hop_text(r, k, list(js)) for k,js in enumerate(refs, 1)]
    answers = [words(r, 3) for _ in refs]
    row = dict(id=f'{shape}__{i}', question=words(r), answer=answers[-1], answer_aliases=[words(r, 3) for _ in range(r.randint(0, 3))], answerable=True,
               question_decomposition=[dict(id=k, question=as_hash(t), answer=a, paragraph_support_idx=s) for k,(t,a,s) in enumerate(zip(templates, answers, support))])
    if kind == 'gold_only':
        row['support_paragraphs'] = [dict(document_id=f'doc {s}', title=paras[s][0], paragraph_text=paras[s][1], match='exact') for s in support]
        for h in row['question_decomposition']: h['document_id'],h['paragraph_support_idx'] = f'doc {h["paragraph_support_idx"]}',r.randint(0, 19)
    else:
        order = r.sample(range(len(paras)), len(paras))
        row['paragraphs'] = [dict(idx=s, title=paras[s][0], paragraph_text=paras[s][1], is_supporting=s in support) for s in order]
    return row,dict(templates=templates, answers=answers, support=[paras[s] for s in support], paras=paras, shape=shape)

def gold_only(r, i): return musique(r, i, 'gold_only')

def hotpotqa(r, i, glue=''):
    paras = [(t, [('' if glue or not j else ' ')+words(r) for j in range(r.randint(1, 4))]) for t,_ in paragraphs(r, r.randint(2, 6), i)]
    gold = r.sample(paras, 2)
    row = dict(_id=f'{i:024x}', question=words(r), answer=words(r, 3), type=r.choice(['bridge', 'comparison']), level='hard', context=[[t, s] for t,s in paras],
               supporting_facts=[[t, r.randrange(len(s))] for t,s in gold])
    return row,dict(templates=[], answers=[], support=[(t, glue.join(s)) for t,s in gold], paras=[(t, glue.join(s)) for t,s in paras], shape=row['type'])

def wiki(r, i):
    row,spec = hotpotqa(r, i, ' ')
    (a,b),mid = [t for t,_ in row['supporting_facts']],f'{words(r, 2)} {i}'
    linked,rel = r.random() < .5,[words(r, 2) for _ in range(2)]
    row['evidences'] = [[a, rel[0], b if linked else mid], [b, rel[1], row['answer']]]
    spec.update(templates=[(a, ' >> ', rel[0]), (1 if linked else b, ' >> ', rel[1])], answers=[row['evidences'][0][2], row['answer']])
    return row,spec

MAKE = dict(musique=musique, gold_only=gold_only, hotpotqa=hotpotqa, wiki=wiki)

def write(path, rows, r=None, listed=False):
    dump = lambda row: json.dumps(row, ensure_ascii=bool(r and r.random() < .5))
    text = '['+',\n'.join(map(dump, rows))+']' if listed else ''.join(dump(row)+'\n' for row in rows)
    path.write_bytes(text.encode())
    return path

@pytest.mark.parametrize('kind', MAKE)
def test_sound_rows_come_back(tmp_path, kind):
    r = random.Random(f'sound {kind}')
    made = [MAKE[kind](r, i) for i in range(N)]
    src = READ[kind](write(tmp_path/'rows.json', [row for row,_ in made], r, listed=kind in ('hotpotqa', 'wiki')))
    assert src.counts['read'] == src.counts['kept'] == len(src.questions) == N
    for (row,spec),q in zip(made, src.questions):
        assert (q.id, q.question, q.answer, q.shape) == (row.get('id', row.get('_id')), row['question'], row['answer'], spec['shape'])
        assert list(q.aliases) == row.get('answer_aliases', [])
        text = lambda ids: [(src.corpus[p].title, src.corpus[p].text) for p in ids]
        assert sorted(text(q.para_ids)) == sorted(spec['paras']) and text(q.gold_ids) == spec['support']
        assert [h.answer for h in q.hops] == spec['answers']
        answers = dict(enumerate(spec['answers'], 1))
        for h,t,s in zip(q.hops, spec['templates'], spec['support']):
            assert resolve_refs(h.question, answers) == answered(t, answers)
            assert set(h.refs) == {x for x in t if isinstance(x, int)}
            assert text(h.para_ids) == [s]
            if ' >> ' in t: assert h.subject and h.relation and h.question.startswith(f'{h.subject} >> ')
            else: assert not h.subject and not h.relation

# Damage: (name, how, path of the field that must be named). `P` is the list of paragraphs, `D` that of the hops.
def damages(kind, row, r):
    one = lambda xs: r.randrange(len(xs))
    P,p_key,id_ = {'musique':('paragraphs', 'idx', 'id'), 'gold_only':('support_paragraphs', 'document_id', 'id')}.get(kind, ('context', None, '_id'))
    junk = r.choice([None, 7, 1.5, 1e308, True, [], {}, [[[]]], {'a':{'b':[None]}}, -2**70, ' ', '\ud800', '\udfff x'])
    texts = [id_, 'question', 'answer']
    k = r.choice(texts)
    yield f'{k} is junk', lambda: row.update({k: junk}), k
    yield f'{k} is missing', lambda: row.pop(k), k
    yield 'not a number', lambda: row.update({k: r.choice([float('nan'), float('inf'), [-float('inf')]])}), '<row>'
    i = one(row[P])
    if kind in ('musique', 'gold_only'):
        D = row['question_decomposition']; j = one(D); d = f'question_decomposition[{j}]'
        key = 'paragraph_support_idx' if kind == 'musique' else 'document_id'
        outside = r.choice([-1, 99, 2**80, '0', 1.0, 1e300, False, [0], {'idx':0}] if kind == 'musique' else ['doc', 'Doc 0', 0, ['doc 0'], {}, True])
        ref = r.choice([f'#{j+1}', f'#{j+2}', '#0', '#99', '#'+'9'*5000])
        wrong = dict(title=r.choice([None, 3, ['x'], '\udc80']), paragraph_text=r.choice([None, False, {}, '\ud83d']))
        if kind == 'musique': wrong.update(idx=r.choice([None, '0', 1.0, True, []]), is_supporting=r.choice([None, 0, 1, 'true', []]))
        else: wrong.update(document_id=r.choice([None, 0, '', {}]))
        f = r.choice(list(wrong))
        yield f'paragraph {f} wrong', lambda: row[P][i].update({f: wrong[f]}), f'{P}[{i}].{f}'
        yield f'paragraph {f} missing', lambda: row[P][i].pop(f), f'{P}[{i}].{f}'
        yield 'paragraph twice', lambda: row[P].append(dict(row[P][0])), f'{P}[{len(row[P])}].{p_key}'
        yield 'paragraph of nothing', lambda: row[P][i].update(title=' ', paragraph_text='\n'), f'{P}[{i}]'
        yield 'paragraph is junk', lambda: row[P].__setitem__(i, r.choice([None, 'x', [], 3])), f'{P}[{i}]'
        yield 'support outside', lambda: D[j].update({key: outside}), f'{d}.{key}'
        yield 'support missing', lambda: D[j].pop(key), f'{d}.{key}'
        yield 'reference outside', lambda: D[j].update(question=f'Who is {ref}?'), f'{d}.question'
        yield 'relation empty', lambda: D[j].update(question=r.choice(['Orm >> ', ' >> capital', '>>', 'Orm >>capital'])), f'{d}.question'
        yield 'hop text junk', lambda: D[j].update(question=junk), f'{d}.question'
        yield 'hop answer junk', lambda: D[j].update(answer=junk), f'{d}.answer'
        yield 'hop is junk', lambda: D.__setitem__(j, r.choice([None, [], 'hop', 0])), d
        yield 'no hops', lambda: row.update(question_decomposition=[]), 'question_decomposition'
        yield 'hops are no list', lambda: row.update(question_decomposition=r.choice([None, {}, 'x', 4])), 'question_decomposition'
        yield 'unneeded hop', lambda: [D.insert(0, dict(D[0])), row.update(id='2hop__x')], 'question_decomposition'
        yield 'aliases junk', lambda: row.update(answer_aliases=r.choice(['x', {}, 3, True])), 'answer_aliases'
        yield 'alias junk', lambda: row.update(answer_aliases=['x', r.choice([None, 3, '', [], '\ud800'])]), 'answer_aliases[1]'
        yield 'answerable junk', lambda: row.update(answerable=r.choice([None, 0, 1, 'true', 'no', []])), 'answerable'
    else:
        F = row['supporting_facts']; j = one(F)
        yield 'paragraph is junk', lambda: row[P].__setitem__(i, r.choice([[], ['x'], ['x', [], 3]])), f'context[{i}]'
        yield 'title junk', lambda: row[P][i].__setitem__(0, junk), f'context[{i}][0]'
        yield 'sentences junk', lambda: row[P][i].__setitem__(1, r.choice([None, 'x', {}, 0])), f'context[{i}][1]'
        yield 'sentence junk', lambda: row[P][i][1].__setitem__(0, r.choice([None, 1, [], '\udead'])), f'context[{i}][1][0]'
        yield 'fact elsewhere', lambda: F[j].__setitem__(0, 'no such title'), f'supporting_facts[{j}][0]'
        yield 'fact number', lambda: F[j].__setitem__(1, r.choice([-1, -2**70, None, '0', 0.0, True])), f'supporting_facts[{j}][1]'
        yield 'fact is junk', lambda: F.__setitem__(j, r.choice([[], ['x'], [1,2,3]])), f'supporting_facts[{j}]'
        yield 'facts missing', lambda: row.pop('supporting_facts'), 'supporting_facts'
        yield 'context junk', lambda: row.update(context=r.choice([{}, 'x', 3, True])), 'context'
        yield 'type junk', lambda: row.update(type=junk), 'type'
        if kind == 'wiki':
            E = row['evidences']; e = one(E); x = r.randrange(3)
            yield 'evidence part junk', lambda: E[e].__setitem__(x, junk), f'evidences[{e}][{x}]'
            yield 'evidence is short', lambda: E[e].pop(), f'evidences[{e}]'
            yield 'evidences missing', lambda: row.pop('evidences'), 'evidences'

def refused(read, path, line, field=None, why=''):
    with pytest.raises(SourceError) as got: read(path)
    e = got.value
    assert (e.file, e.line) == (str(path), line), f'{why}: {e}'
    assert field is None or e.field == field, f'{why}: expected field {field}: {e}'
    assert e.field and str(e).startswith(f'{path}:{line}: field {e.field!r}: ') and len(str(e)) < len(str(path))+400
    str(e).encode()  # a message that can be printed

@pytest.mark.parametrize('kind', MAKE)
def test_damaged_rows_are_refused(tmp_path, kind):
    r,seen = random.Random(f'damaged {kind}'),set()
    for i in range(N):
        good,(row,_) = [MAKE[kind](r, 10**6+j)[0] for j in range(r.randint(0, 2))],MAKE[kind](r, i)
        why,how,field = r.choice(list(damages(kind, row, r)))
        how(); seen.add(why)
        listed,path,n = r.random() < .3,tmp_path/'rows.json',len(good)
        path.write_text(json.dumps([*good, row]) if listed else ''.join(json.dumps(x)+'\n' for x in (*good, row)), encoding='utf-8')
        if listed: field = f'[{n}]' if field == '<row>' else f'[{n}].{field}'
        refused(READ[kind], path, 1 if listed else n+1, field, why)
    assert {d[0] for d in damages(kind, MAKE[kind](r, 0)[0], r)} - {f'{k} is {x}' for k in ('id', '_id', 'question', 'answer') for x in ('junk', 'missing')} <= seen

@pytest.mark.parametrize('kind', MAKE)
def test_duplicate_ids_are_refused(tmp_path, kind):
    r = random.Random(f'twice {kind}')
    rows = [MAKE[kind](r, i)[0] for i in (1, 2, 1)]
    rows[2]['id' if 'id' in rows[0] else '_id'] = rows[0].get('id', rows[0].get('_id'))
    if 'question_decomposition' in rows[0]: rows[2] = dict(rows[0])
    refused(READ[kind], write(tmp_path/'rows.jsonl', rows), 3, 'id' if 'id' in rows[0] else '_id')

@pytest.mark.parametrize('kind', MAKE)
def test_any_bytes_give_a_source_or_a_source_error(tmp_path, kind):
    r,path,good = random.Random(f'bytes {kind}'),tmp_path/'rows.jsonl',0
    for i in range(N//3):
        b = bytearray(write(path, [MAKE[kind](r, 2*i+j)[0] for j in range(2)], r, listed=i%3 == 0).read_bytes())
        for _ in range(r.randint(1, 3)):
            what,at = r.choice(['cut', 'flip', 'insert', 'drop']),r.randrange(len(b))
            if what == 'cut': del b[at:]
            elif what == 'flip': b[at] = r.randrange(256)
            elif what == 'insert': b[at:at] = r.choice([b'\xff', b'\x00', b'"', b'\n', b'{', b']', b'NaN', b'[' * 3000, b'\\ud800', b'9' * 5000, b'-', b'\\'])
            else: del b[at:at+r.randint(1, 40)]
            if not b: break
        path.write_bytes(bytes(b))
        try: good += bool(READ[kind](path).questions)
        except SourceError as e: assert e.file == str(path) and e.field and f'{e.file}:{e.line}: field {e.field!r}' in str(e)
    assert 0 < good < N//3

TORN = {'torn row':(b'{"id":1}\n{"id":', 2, '<row>'), 'latin-1':(b'{"id":1}\n\n{"id":"\xe9"}\n', 3, '<row>'), 'utf-16':('{"id":1}'.encode('utf-16'), 1, '<row>'), 'empty':(b'', 0, '<file>'),
        'blank lines':(b'\n \n\r\n', 0, '<file>'), 'empty list':(b' [ ] ', 0, '<file>'), 'nan':(b'{"id":NaN}', 1, '<row>'), 'infinity':(b'\n{"id":-Infinity}', 2, '<row>'),
        'huge integer':(b'{"id":' + b'9'*5000 + b'}', 1, '<row>'), 'deep':(b'{"id":' + b'['*200_000, 1, '<row>'), 'two rows in a line':(b'{}{}', 1, '<row>'), 'scalar':(b'"x"', 1, '<row>'),
        'raw control character':(b'{"id":"a\x01b"}', 1, '<row>'), 'torn list':(b'[{"id":1},\n{"id":2', 2, '[1]'), 'list in a list':(b'[[1]]', 1, '[0]'), 'list without commas':(b'[{} {}]', 1, '[0]'),
        'list ends in a comma':(b'[{},]', 1, '[1]'), 'text after the list':(b'[{}]\n{}', 2, '<row>'), 'latin-1 in a list':(b'[{},\n"\xe9"]', 2, '<row>'), 'lonely bracket':(b'[', 1, '[0]')}

@pytest.mark.parametrize('name', TORN)
def test_broken_files_are_refused(tmp_path, name):
    b,line,field = TORN[name]
    path = tmp_path/'rows.jsonl'
    path.write_bytes(b)
    refused(lambda p: list(read_rows(p)), path, line, field)
    for read in (read_source, read_musique, read_paragraph_pool, Corpus.load):
        with pytest.raises(SourceError): read(path)

def test_files_that_are_none_are_refused(tmp_path):
    for read in (read_source, read_musique, read_gold_only, read_hotpotqa, read_2wiki, read_paragraph_pool, Corpus.load):
        refused(read, tmp_path, 0, '<file>')
        refused(read, tmp_path/'absent.jsonl', 0, '<file>')
        refused(read, tmp_path/'nul\0.jsonl', 0, '<file>')

def test_byte_order_mark_and_carriage_returns(tmp_path):
    row,_ = musique(random.Random(0), 1)
    path = tmp_path/'rows.jsonl'
    path.write_bytes(b'\xef\xbb\xbf' + json.dumps(row).encode() + b'\r\n\r\n')
    assert read_source(path).questions == read_musique(write(tmp_path/'plain.jsonl', [row])).questions
    path.write_bytes(b'\xef\xbb\xbf' + json.dumps([row]).encode() + b'\r\n')
    assert read_source(path).questions == read_musique(tmp_path/'plain.jsonl').questions

def test_unanswerable_and_bare_rows_are_counted(tmp_path):
    r,rows = random.Random(5),[]
    for i in range(60):
        row,_ = musique(r, i)
        rows.append(row)
        if i%3 == 0: rows.append(dict(row, answerable=False, question_decomposition=[dict(h, paragraph_support_idx=None) for h in row['question_decomposition']]))
        if i%3 == 1: row.update(paragraphs=None) if i%2 else row.pop('paragraphs')
        if i%3 == 2: row['question_decomposition'][0]['paragraph_support_idx'] = None
    src = read_musique(write(tmp_path/'full.jsonl', rows))
    assert (src.counts['read'], src.counts['kept'], src.counts['unanswerable'], src.counts['without_paragraphs']) == (80, 60, 20, 20)
    assert src.counts['hops_without_support'] == 20 and src.counts['support_marks_differ'] == 20
    assert all(q.hops[0].para_ids == () and len(q.gold_ids) == len(q.hops) for q in src.questions[2::3])

def test_corpus_survives_a_round_trip(tmp_path):
    r = random.Random(6)
    c = Corpus(make_paragraph(t, s) for t,s in paragraphs(r, 500, 'c'))
    back = Corpus.load(c.save(tmp_path/'c.jsonl'))
    assert list(back) == list(c) and back.hash == c.hash == Corpus(reversed(list(c))).hash
    lines = (tmp_path/'c.jsonl').read_text(encoding='utf-8').split('\n')
    row = json.loads(lines[77]); row['text'] += 'x'; lines[77] = json.dumps(row)
    (tmp_path/'c.jsonl').write_text('\n'.join(lines), encoding='utf-8')
    refused(Corpus.load, tmp_path/'c.jsonl', 78, 'id')

# Adversarial sources, in every schema to which they apply: each ends in an error with file, line and field, or in a count with lines.

def rows_of(kind, n=3):
    r = random.Random(f'adversarial {kind}')
    return [MAKE[kind](r, i)[0] for i in range(n)]

def id_of(kind): return 'id' if kind in HOPS else '_id'
HOPS = ('musique', 'gold_only')

def bad_hop(tmp_path, kind, at, line=2, **change):
    "Change hop `at` of the row in `line`; which field is named?"
    rows = rows_of(kind)
    rows[1] = next(row for row in (MAKE[kind](random.Random(f'{kind} {i}'), i)[0] for i in range(100)) if len(row['question_decomposition']) == 2)
    rows[1]['question_decomposition'][at].update(change)
    refused(READ[kind], write(tmp_path/'rows.jsonl', rows), line, f'question_decomposition[{at}].{next(iter(change))}')

@pytest.mark.parametrize('kind', HOPS)
@pytest.mark.parametrize('at,ref', [(0, '#1'), (0, '#2'), (1, '#2'), (1, '#3'), (1, '#0'), (0, '#0'), (1, '#12'), (1, '#01 and #00'), (1, '#1 or #12'), (0, '#2 >> mayor'), (1, '#12 >> mayor')])
def test_references_forward_to_nothing_and_beyond(tmp_path, kind, at, ref): bad_hop(tmp_path, kind, at, question=ref)

@pytest.mark.parametrize('kind', MAKE)
@pytest.mark.parametrize('blank', ['', ' ', '\t\n', '\u3000'])
def test_empty_answers(tmp_path, kind, blank):
    rows = rows_of(kind)
    rows[1]['answer'] = blank
    refused(READ[kind], write(tmp_path/'rows.jsonl', rows), 2, 'answer')
    if kind in HOPS:
        for at in (0, 1): bad_hop(tmp_path, kind, at, answer=blank)
    if kind == 'wiki':
        rows = rows_of(kind)
        rows[2]['evidences'][0][2] = blank
        refused(read_2wiki, write(tmp_path/'rows.jsonl', rows), 3, 'evidences[0][2]')

@pytest.mark.parametrize('support', [-1, 20, 2**63, '0', 1.0, True, [0]])
def test_support_out_of_range(tmp_path, support):
    bad_hop(tmp_path, 'musique', 1, paragraph_support_idx=support)
    bad_hop(tmp_path, 'gold_only', 1, document_id=support)

@pytest.mark.parametrize('kind', ['hotpotqa', 'wiki'])
def test_facts_out_of_range(tmp_path, kind):
    rows = rows_of(kind)
    rows[1]['supporting_facts'][0][1] = 99
    src = READ[kind](write(tmp_path/'rows.jsonl', rows))
    assert src.counts['sentence_out_of_range'] == 1 and src.lines['sentence_out_of_range'] == [2]
    rows[2]['supporting_facts'][1][0] += '?'
    refused(READ[kind], write(tmp_path/'rows.jsonl', rows), 3, 'supporting_facts[1][0]')

@pytest.mark.parametrize('second', MAKE)
@pytest.mark.parametrize('first', MAKE)
def test_mixed_schemas_in_one_file(tmp_path, first, second):
    if first == second: return
    row = rows_of(second)[1]
    refused(read_source, write(tmp_path/'rows.jsonl', [*rows_of(first), row]), 4)
    refused(READ[first], write(tmp_path/'rows.jsonl', [*rows_of(first), row]), 4)
    refused(READ[first], write(tmp_path/'rows.jsonl', [row]), 1)

@pytest.mark.parametrize('kind', MAKE)
def test_truncated_last_line(tmp_path, kind):
    path = write(tmp_path/'rows.jsonl', rows_of(kind))
    b,r = path.read_bytes(),random.Random(kind)
    start = b.rstrip(b'\n').rfind(b'\n')+1
    for end in r.sample(range(start+1, len(b)-1), 60):
        path.write_bytes(b[:end])
        refused(READ[kind], path, 3, '<row>')
    path.write_bytes(b[:-1])
    assert len(READ[kind](path).questions) == 3

@pytest.mark.parametrize('kind', MAKE)
def test_nul_bytes(tmp_path, kind):
    path = write(tmp_path/'rows.jsonl', rows_of(kind))
    lines,r = path.read_bytes().splitlines(keepends=True),random.Random(kind)
    for nul in (b'\0', b'\0'*4096):
        for at in [0, len(lines[1])-2, *r.sample(range(1, len(lines[1])-1), 40)]:
            path.write_bytes(b''.join([lines[0], lines[1][:at]+nul+lines[1][at:], lines[2]]))
            refused(READ[kind], path, 2, '<row>')
        path.write_bytes(b''.join(lines)+nul)
        refused(READ[kind], path, 4, '<row>')
    path.write_bytes(b'\0'*100_000)
    refused(READ[kind], path, 1, '<row>')

@pytest.mark.parametrize('kind', MAKE)
def test_a_paragraph_of_ten_megabytes(tmp_path, kind):
    rows,huge = rows_of(kind),'x'*10_000_000
    if kind in HOPS:
        P = 'paragraphs' if kind == 'musique' else 'support_paragraphs'
        rows[1][P][1]['paragraph_text'],where = huge,f'{P}[1].paragraph_text'
    else: rows[1]['context'][1][1][0],where = huge,'context[1][1][0]'
    path = write(tmp_path/'rows.jsonl', rows)
    refused(READ[kind], path, 2, where)
    if kind not in HOPS:  # in small pieces
        rows[1]['context'][1][1] = [huge[:10_000]]*1000
        refused(READ[kind], write(path, rows), 2, 'context[1][1]')
    rows = rows_of(kind)
    rows[2]['question'] = huge
    refused(READ[kind], write(path, rows), 3, 'question')

def test_ten_megabytes_in_a_pool(tmp_path):
    refused(read_paragraph_pool, write(tmp_path/'pool.jsonl', [dict(title='Orm', text='A town.'), dict(title='Quell', text='x'*10_000_000)]), 2, 'text')

@pytest.mark.parametrize('listed', [False, True])
@pytest.mark.parametrize('kind', MAKE)
def test_an_id_twice_names_both_lines(tmp_path, kind, listed):
    rows = rows_of(kind)
    with pytest.raises(SourceError, match='stands in line 1 already'): READ[kind](write(tmp_path/'rows.json', [*rows, rows[0]], listed=listed))
    refused(READ[kind], tmp_path/'rows.json', 4, ('[3].' if listed else '')+id_of(kind))

def test_document_ids_give_titles(tmp_path):
    rows = rows_of('gold_only')
    for row in rows: del row['support_paragraphs']
    src = read_source(write(tmp_path/'rows.jsonl', rows))
    assert src.counts['without_paragraphs'] == 3 and src.lines == {'without_paragraphs': [1, 2, 3]} and not len(src.corpus)
    for row,q in zip(rows, src.questions):
        for h in row['question_decomposition']: h['document_id'] += '_4'
        assert q.titles == tuple(h['document_id'][:-2] for h in row['question_decomposition'])  # no number behind: the id is the title
    assert read_source(write(tmp_path/'rows.jsonl', rows)).questions == src.questions
    for junk in (None, 3, '', '_7', ['Orm_0']):
        rows[1]['question_decomposition'][1]['document_id'] = junk
        refused(read_source, write(tmp_path/'rows.jsonl', rows), 2, 'question_decomposition[1].document_id')

def test_ids_link_evidences(tmp_path):
    row = dict(rows_of('wiki')[0], type='compositional', evidences=[['Orm', 'mayor', 'Ada M. Vint'], ['Ada Vint', 'born in', 'Hask']], answer='Hask')
    read = lambda **change: read_2wiki(write(tmp_path/'rows.jsonl', [dict(row, **change)]))
    linked = read(evidences_id=[['Q1', 'mayor', 'Q2'], ['Q2', 'born in', 'Q3']])
    assert [h.question for h in linked.questions[0].hops] == ['Orm >> mayor', '[A_1] >> born in'] and linked.questions[0].decomposed and linked.lines['linked_by_id'] == [1]
    for ids in (None, [], [['Q1', 'mayor', 'Q2']], [['', 'mayor', ''], ['', 'born in', '']], [['Q1', 'mayor', 'Q2'], ['Q4', 'born in', 'Q3']]):
        loose = read(evidences_id=ids)
        assert not loose.questions[0].decomposed and loose.lines['no_chain_compositional'] == [1] and 'linked_by_id' not in loose.counts
    refused(read_2wiki, write(tmp_path/'rows.jsonl', [dict(row, evidences_id=[['Q1', 'mayor'], ['Q2', 'born in', 'Q3']])]), 1, 'evidences_id[0]')

DATA = os.environ.get('CMTRAG_DATA')

@pytest.mark.skipif(not DATA, reason='CMTRAG_DATA is not set')
def test_real_rows_are_read_quickly():
    path = Path(DATA)/'musique/musique_ans_dev_200.jsonl'
    def seconds():
        t = time.perf_counter(); read_source(path)
        return time.perf_counter()-t
    assert min(seconds() for _ in range(3)) < 1

@pytest.mark.skipif(not DATA, reason='CMTRAG_DATA is not set')
@pytest.mark.parametrize('name', ['musique/musique_ans_dev_200', 'musique/musique_ans_dev_gold_only', 'hotpotqa/hotpot_dev_distractor_100', '2wikimultihopqa/2wiki_dev_100'])
def test_real_rows_come_back(name):
    path = Path(DATA)/f'{name}.jsonl'
    rows,src = [json.loads(s) for s in path.read_text(encoding='utf-8').splitlines()],read_source(path)
    assert src.counts['read'] == src.counts['kept'] == len(rows)
    for row,q in zip(rows, src.questions):
        assert (q.id, q.question, q.answer, list(q.aliases)) == (row.get('id', row.get('_id')), row['question'], row['answer'], row.get('answer_aliases', []))
        assert q.gold_ids and set(q.gold_ids) <= set(q.para_ids) <= set(src.corpus.ids)
        if 'question_decomposition' in row:
            answers = {k: f'<{k}>' for k in range(1, 5)}
            for h,d in zip(q.hops, row['question_decomposition']):
                expected = d['question']
                for k in answers: expected = expected.replace(f'#{k}', answers[k])
                assert (resolve_refs(h.question, answers), h.answer) == (expected, d['answer'])
