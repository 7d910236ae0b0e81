'use strict';
// Shows the cards of mistakes that fit the filters. All text is set as text, never as HTML.
(() => {
  const PAGE = 48;
  const KINDS = { fp: 'False positive', fn: 'False negative', random: 'Random image' };
  const get = id => document.getElementById(id);
  const data = JSON.parse(get('mistakes-data').textContent);
  const form = get('mistakes-filters');
  const { result, kind, search } = form.elements;
  const chosenClass = form.elements.class;
  const list = get('mistakes-list');
  const more = get('mistakes-more');
  let found = [];
  let shown = 0;

  const element = (tag, className, ...content) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    node.append(...content);
    return node;
  };
  const name = text => element('bdi', '', text);
  const plural = (number, what) => `${number.toLocaleString('en')} ${what}${number === 1 ? '' : 's'}`;
  const plain = text => text.normalize('NFKC').toLowerCase();
  const option = (value, text) => {
    const node = element('option', '', text);
    node.value = value;
    return node;
  };

  const cards = data.cards.map(([number, image, view, cardKind, index, probability]) => {
    const classes = data.results[number].classes;
    const [labels, rest] = data.views[view];
    const words = [data.files[image], ...labels.map(label => classes[label[0]])];
    return { number, image, labels, rest, kind: cardKind, index, probability, classes, text: plain(words.join('\n')) };
  });

  const fillClasses = () => {
    const before = chosenClass.value;
    const { classes, wrong } = data.results[Number(result.value)];
    chosenClass.replaceChildren(option('', 'All classes'));
    const order = classes.map((_, index) => index).sort((a, b) => classes[a].localeCompare(classes[b]));
    for (const index of order) {
      chosenClass.append(option(classes[index], `${classes[index]} (${wrong[0][index]} FP, ${wrong[1][index]} FN)`));
    }
    chosenClass.value = classes.includes(before) ? before : '';
  };

  const labelList = (title, labels, classes, className) => {
    const node = element('p', `labels ${className}`, element('span', 'title', `${title}: `));
    labels.forEach(([index, probability], place) => {
      node.append(place ? ', ' : '', name(classes[index]), ` ${probability.toFixed(3)}`);
    });
    return node;
  };

  const show = card => {
    const { labels, classes } = card;
    const file = data.files[card.image];
    const thumbnail = data.thumbnails[card.image];
    const frame = element('div', 'frame');
    if (thumbnail) {
      const image = element('img');
      Object.assign(image, { alt: `Image ${file}`, decoding: 'async', loading: 'lazy' });
      image.src = `data:image/jpeg;base64,${thumbnail}`;
      frame.append(image);
    } else {
      frame.append(element('span', 'pale', 'no picture'));
    }
    const node = element('li', `card ${card.kind}`, frame, element('span', 'badge', KINDS[card.kind]));
    if (card.index >= 0) {
      const threshold = data.results[card.number].thresholds[card.index];
      const meter = element('div', 'meter', element('i'), element('b'));
      meter.firstChild.style.width = `${100 * card.probability}%`;
      meter.lastChild.style.left = `${100 * threshold}%`;
      node.append(
        element('h3', '', name(classes[card.index])), meter,
        element('p', 'labels', `probability ${card.probability.toFixed(3)}, threshold ${threshold.toFixed(3)}`));
    }
    const others = labels.filter(label => label[0] !== card.index);
    const groups = [
      ['Correct', 'correct', label => label[2] === 1 && label[3]],
      [card.index < 0 ? 'False positive' : 'Also false positive', 'extra', label => label[2] === 0],
      [card.index < 0 ? 'False negative' : 'Also false negative', 'missed', label => label[2] === 1 && !label[3]],
      ['Predicted, label unknown', 'pale', label => label[2] === -1],
    ];
    for (const [title, className, fits] of groups) {
      const some = others.filter(fits);
      if (some.length) node.append(labelList(title, some, classes, className));
    }
    if (!labels.length) node.append(element('p', 'labels correct', 'Correct: no label, none predicted'));
    if (card.rest) node.append(element('p', 'labels pale', `and ${plural(card.rest, 'more label')}`));
    node.append(element('p', 'file', name(file)));
    return node;
  };

  const showMore = () => {
    list.append(...found.slice(shown, shown + PAGE).map(show));
    shown = Math.min(found.length, shown + PAGE);
    more.hidden = shown >= found.length;
    more.textContent = `Show ${Math.min(PAGE, found.length - shown)} more`;
  };

  const describe = () => {
    const number = Number(result.value);
    const { classes, wrong, images } = data.results[number];
    const index = classes.indexOf(chosenClass.value);
    const total = kindIndex => index < 0 ? wrong[kindIndex].reduce((a, b) => a + b, 0) : wrong[kindIndex][index];
    const all = `${plural(total(0), 'false positive')} and ${plural(total(1), 'false negative')} in ` +
      `${plural(images, 'image')}${index < 0 ? '' : ` for ${chosenClass.value}`}`;
    get('mistakes-status').textContent = `${plural(found.length, 'card')} for these filters. The result has ${all}.`;
  };

  const apply = () => {
    const words = plain(search.value).split(/\s+/).filter(Boolean);
    const number = Number(result.value);
    const index = data.results[number].classes.indexOf(chosenClass.value);
    found = cards.filter(card =>
      card.number === number && (!kind.value || card.kind === kind.value) &&
      (index < 0 || card.index === index || (card.index < 0 && card.labels.some(label => label[0] === index))) &&
      words.every(word => card.text.includes(word)));
    list.replaceChildren();
    shown = 0;
    showMore();
    describe();
  };

  // The filters are part of the address, so that a view can be bookmarked and sent.
  const save = () => {
    const state = new URLSearchParams({ mistakes: '' });
    if (result.value !== '0') state.set('result', data.results[Number(result.value)].name);
    for (const [key, field] of [['class', chosenClass], ['kind', kind], ['search', search]]) {
      if (field.value) state.set(key, field.value);
    }
    try {
      history.replaceState(null, '', `#${state}`);
    } catch { /* a page without an address of its own */ }
  };
  const load = () => {
    const state = new URLSearchParams(location.hash.slice(1));
    if (!state.has('mistakes')) return false;
    const number = data.results.findIndex(one => one.name === state.get('result'));
    result.value = String(Math.max(0, number));
    fillClasses();
    chosenClass.value = state.get('class') ?? '';
    kind.value = state.get('kind') in KINDS ? state.get('kind') : '';
    search.value = state.get('search') ?? '';
    if (chosenClass.selectedIndex < 0) chosenClass.value = '';
    return true;
  };

  data.results.forEach((one, number) => result.append(option(String(number), one.name)));
  result.closest('label').hidden = data.results.length < 2;
  form.addEventListener('submit', event => event.preventDefault());
  form.addEventListener('reset', event => {
    event.preventDefault();
    for (const field of [chosenClass, kind, search]) field.value = '';
    apply();
    save();
  });
  form.addEventListener('input', event => {
    if (event.target === result) fillClasses();
    apply();
    save();
  });
  more.addEventListener('click', () => {
    const first = shown;
    showMore();
    list.children[first].tabIndex = -1;
    list.children[first].focus({ preventScroll: true });  // the keyboard continues at the first new card
  });
  window.addEventListener('hashchange', () => { if (load()) apply(); });
  form.hidden = false;
  fillClasses();
  const linked = load();
  apply();
  if (linked) form.closest('section').scrollIntoView();
})();
